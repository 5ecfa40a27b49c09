#include "tests/fake_backend.h"

#include <cstring>
#include <stdexcept>

#include "tests/check.h"

namespace jaxoffload::testing {
namespace {

uint64_t Fold(uint64_t hash, const char* data, int64_t bytes) {
  for (int64_t i = 0; i + 8 <= bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, data + i, 8);
    hash = Mix(hash, word);
  }
  return hash;
}

void Fill(char* data, int64_t bytes, uint64_t hash) {
  for (int64_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t word = Mix(hash, static_cast<uint64_t>(i));
    std::memcpy(data + i, &word, 8);
  }
}

// What output number `position` of a kernel holds, given the fold of all its inputs.
uint64_t OutputHash(int32_t vertex_id, int64_t position, uint64_t inputs) {
  return Mix(Mix(static_cast<uint64_t>(vertex_id), static_cast<uint64_t>(position)), inputs);
}

}  // namespace

void FakeBackend::Begin(RunContext&) {
  CHECK_EQ(num_begun.load(), num_ended.load());  // one run at a time
  ++num_begun;
  if (failing == kFailsInBegin) throw std::runtime_error("begin fails");
}

bool FakeBackend::Execute(int32_t vertex_id, RunContext& context, std::string* error) {
  ++num_executed;
  if (on_execute) on_execute(vertex_id);
  if (failing == vertex_id) {
    *error = "vertex fails";
    return false;
  }
  const Range inputs = plan_->inputs(vertex_id);
  const Range outputs = plan_->outputs(vertex_id);
  if (!IsKernel(plan_->kind(vertex_id))) {
    const int32_t to = plan_->output(outputs.begin);
    CopyBytes(context.address[to], context.address[plan_->input(inputs.begin)], plan_->bytes(to),
              context.abort);
    return true;
  }
  uint64_t hash = 0;
  for (int64_t i = inputs.begin; i < inputs.end; ++i) {
    const int32_t version = plan_->input(i);
    hash = Fold(hash, context.address[version], plan_->bytes(version));
  }
  for (int64_t o = outputs.begin; o < outputs.end; ++o) {
    const int32_t version = plan_->output(o);
    Fill(context.address[version], plan_->bytes(version),
         OutputHash(vertex_id, o - outputs.begin, hash));
  }
  return true;
}

Arrays::Arrays(const LoadedPlan& plan, uint64_t seed) {
  for (size_t i = 0; i < plan.argument_bytes().size(); ++i) {
    arguments_.emplace_back(plan.argument_bytes()[i]);
    Fill(arguments_.back().data(), arguments_.back().size(), Mix(seed, i));
  }
  for (int64_t bytes : plan.result_bytes()) results_.emplace_back(bytes);
  Expect(plan);
}

std::vector<char*> Arrays::Pointers(std::vector<std::vector<char>>& arrays) {
  std::vector<char*> pointers;
  for (std::vector<char>& array : arrays) pointers.push_back(array.data());
  return pointers;
}

void Arrays::Expect(const LoadedPlan& plan) {
  for (int64_t bytes : plan.result_bytes()) expected_.emplace_back(bytes);
  std::vector<std::vector<char>> value(plan.num_versions());
  for (int32_t v = 0; v < plan.num_versions(); ++v) {
    value[v].resize(plan.bytes(v));
    if (plan.space(v) != Space::kArgument || plan.bytes(v) == 0) continue;
    std::memcpy(value[v].data(), arguments_[plan.index(v)].data() + plan.offset(v), plan.bytes(v));
  }
  for (int32_t vertex = 0; vertex < plan.num_vertices(); ++vertex) {
    const Range inputs = plan.inputs(vertex);
    const Range outputs = plan.outputs(vertex);
    uint64_t hash = 0;
    for (int64_t i = inputs.begin; i < inputs.end; ++i) {
      hash = Fold(hash, value[plan.input(i)].data(), plan.bytes(plan.input(i)));
    }
    for (int64_t o = outputs.begin; o < outputs.end; ++o) {
      std::vector<char>& out = value[plan.output(o)];
      if (IsKernel(plan.kind(vertex))) {
        Fill(out.data(), out.size(), OutputHash(vertex, o - outputs.begin, hash));
      } else {
        out = value[plan.input(inputs.begin)];
      }
    }
  }
  for (int32_t v = 0; v < plan.num_versions(); ++v) {
    if (plan.space(v) != Space::kResult || plan.bytes(v) == 0) continue;
    std::memcpy(expected_[plan.index(v)].data() + plan.offset(v), value[v].data(), plan.bytes(v));
  }
}

}  // namespace jaxoffload::testing
