#include "planner/emitter.h"

#include <algorithm>
#include <utility>

#include "planner/sums.h"

namespace jaxoffload {
namespace {

bool IsCopy(uint8_t kind) {
  switch (static_cast<Kind>(kind)) {
    case Kind::kReload:
    case Kind::kPeerReload:
    case Kind::kOffload:
    case Kind::kLoad:
    case Kind::kStore:
      return true;
    default:
      return false;
  }
}

// Drops the entries that do not stay.
template <typename T>
void Compress(std::vector<T>* values, const std::vector<bool>& stays) {
  size_t kept = 0;
  for (size_t i = 0; i < values->size(); ++i) {
    if (stays[i]) (*values)[kept++] = (*values)[i];
  }
  values->resize(kept);
}

// The same for the rows of a CSR array; what its values number is numbered anew.
void CompressRows(std::vector<int64_t>* offsets, std::vector<int32_t>* values,
                  const std::vector<bool>& stays, const std::vector<int32_t>& number) {
  std::vector<int64_t> kept{0};
  int64_t count = 0;
  for (size_t row = 0; row + 1 < offsets->size(); ++row) {
    if (!stays[row]) continue;
    for (int64_t at = (*offsets)[row]; at < (*offsets)[row + 1]; ++at) {
      (*values)[count++] = number[(*values)[at]];
    }
    kept.push_back(count);
  }
  values->resize(count);
  *offsets = std::move(kept);
}

// The new number of each, counting only those that stay.
std::vector<int32_t> Numbers(const std::vector<bool>& stays) {
  std::vector<int32_t> found(stays.size());
  int32_t count = 0;
  for (size_t i = 0; i < stays.size(); ++i) found[i] = stays[i] ? count++ : kNone;
  return found;
}

}  // namespace

int32_t Emitter::Version(int32_t tensor, Space space, int32_t index, int64_t offset) {
  columns_.tensor.push_back(tensor);
  columns_.space.push_back(static_cast<uint8_t>(space));
  columns_.index.push_back(index);
  columns_.offset.push_back(offset);
  columns_.writer.push_back(kNone);
  over_.push_back(kNone);
  first_reader_.push_back(kNone);
  last_reader_.push_back(kNone);
  num_readers_.push_back(0);
  return static_cast<int32_t>(columns_.tensor.size()) - 1;
}

void Emitter::Vertex(Kind kind, int64_t task_vertex, int32_t device,
                     const std::vector<int32_t>& inputs, const std::vector<int32_t>& outputs,
                     const std::vector<int32_t>& after) {
  const auto vertex = static_cast<int32_t>(columns_.kind.size());
  columns_.kind.push_back(static_cast<uint8_t>(kind));
  columns_.task_vertex.push_back(static_cast<int32_t>(task_vertex));
  columns_.device.push_back(device);
  columns_.inputs.insert(columns_.inputs.end(), inputs.begin(), inputs.end());
  columns_.input_offsets.push_back(static_cast<int64_t>(columns_.inputs.size()));
  columns_.outputs.insert(columns_.outputs.end(), outputs.begin(), outputs.end());
  columns_.output_offsets.push_back(static_cast<int64_t>(columns_.outputs.size()));
  row_.clear();
  for (const int32_t tail : after) row_.push_back({tail, false});
  for (const int32_t version : inputs) {
    const auto reader = static_cast<int32_t>(readers_.size());
    readers_.push_back({vertex, kNone});
    if (first_reader_[version] == kNone) {
      first_reader_[version] = reader;
    } else {
      readers_[last_reader_[version]].next = reader;
    }
    last_reader_[version] = reader;
    ++num_readers_[version];
    if (columns_.writer[version] >= 0) row_.push_back({columns_.writer[version], true});
  }
  for (const int32_t version : outputs) columns_.writer[version] = vertex;
  edges_.Add(&row_);
}

void Emitter::Stays(int32_t version) {
  columns_.residents.push_back(version);
  columns_.owed.push_back(kNone);
}

void Emitter::Owes(int32_t resident, int32_t result) {
  const std::vector<int32_t>& all = columns_.residents;
  columns_.owed[std::find(all.begin(), all.end(), resident) - all.begin()] = result;
}

Dependencies Emitter::LastUsers(int32_t version) {
  const auto first = static_cast<int64_t>(pool_.size());
  AppendReaders(&pool_, version);
  if (first == static_cast<int64_t>(pool_.size())) pool_.push_back(columns_.writer[version]);
  return {first, static_cast<int32_t>(static_cast<int64_t>(pool_.size()) - first)};
}

void Emitter::AppendTo(std::vector<int32_t>* vertices, Dependencies after) const {
  if (after.count == 0) return;
  vertices->insert(vertices->end(), pool_.begin() + after.first,
                   pool_.begin() + after.first + after.count);
}

void Emitter::AppendReaders(std::vector<int32_t>* vertices, int32_t version) const {
  for (int32_t r = first_reader_[version]; r != kNone; r = readers_[r].next) {
    vertices->push_back(readers_[r].vertex);
  }
}

MemGraphColumns Emitter::Finish(const uint8_t* adds, bool unreduced) {
  DropDeadCopies();
  const std::vector<int32_t> sums = FirstOfSum(columns_, adds, over_);
  if (!sums.empty()) edges_ = InAnyOrder(edges_, columns_, sums);
  if (!unreduced) edges_ = ReduceTransitively(edges_);
  for (int64_t head = 0; head < edges_.num_rows(); ++head) {
    for (const Edge& edge : edges_[head]) {
      columns_.edge_tail.push_back(edge.tail);
      columns_.edge_head.push_back(static_cast<int32_t>(head));
      columns_.edge_kind.push_back(edge.is_data ? 0 : 1);
    }
  }
  columns_.overwritten.reserve(columns_.outputs.size());
  for (const int32_t version : columns_.outputs) columns_.overwritten.push_back(over_[version]);
  return std::move(columns_);
}

void Emitter::DropDeadCopies() {
  std::vector<bool> stays(columns_.kind.size(), true), kept(columns_.tensor.size(), true);
  bool drops = false;
  for (auto v = static_cast<int64_t>(stays.size()) - 1; v >= 0; --v) {
    if (!IsCopy(columns_.kind[v])) continue;
    const int32_t made = columns_.outputs[columns_.output_offsets[v]];
    if (num_readers_[made] > 0 || space(made) == Space::kResult) continue;
    stays[v] = kept[made] = false;
    drops = true;
    --num_readers_[columns_.inputs[columns_.input_offsets[v]]];
  }
  if (!drops) return;
  edges_ = Without(edges_, stays);
  const std::vector<int32_t> vertex = Numbers(stays), version = Numbers(kept);
  Compress(&columns_.kind, stays);
  Compress(&columns_.task_vertex, stays);
  Compress(&columns_.device, stays);
  CompressRows(&columns_.input_offsets, &columns_.inputs, stays, version);
  CompressRows(&columns_.output_offsets, &columns_.outputs, stays, version);
  Compress(&columns_.tensor, kept);
  Compress(&columns_.space, kept);
  Compress(&columns_.index, kept);
  Compress(&columns_.offset, kept);
  Compress(&columns_.writer, kept);
  Compress(&over_, kept);
  for (int32_t& writer : columns_.writer) writer = writer >= 0 ? vertex[writer] : writer;
  for (int32_t& resident : columns_.residents) resident = version[resident];
  for (int32_t& result : columns_.owed) result = result >= 0 ? version[result] : result;
  for (int32_t& old : over_) old = old >= 0 ? version[old] : old;
}

}  // namespace jaxoffload
