#include "planner/serial_orders.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>

#include "planner/callers_memory.h"
#include "planner/simulate.h"

namespace jaxoffload {
namespace {

// Share of all arguments' bytes from which on an argument is worth being brought seldom.
constexpr double kHeavy = 1.0 / 64;
// Readers of a heavy argument, from which on they may be of several micro-batches: each has one in
// its forward and one in its backward pass.
constexpr int64_t kReaders = 4;

// Which vertices must come before which: producers, and readers of what a vertex writes over.
struct Needs {
  explicit Needs(const TaskTable& table);

  Row before(int64_t vertex) const {
    return {tail.data() + offsets[vertex], tail.data() + offsets[vertex + 1]};
  }

  std::vector<int64_t> offsets;  // CSR, by the vertex that comes after
  std::vector<int32_t> tail;     // ascending, each once
  std::vector<int32_t> head;
};

Needs::Needs(const TaskTable& table) {
  const int64_t count = table.num_vertices();
  std::vector<int32_t> producer(table.num_tensors(), -1);
  for (int64_t v = 0; v < count; ++v) {
    for (const int32_t t : table.outputs(v)) producer[t] = static_cast<int32_t>(v);
  }
  const CallersMemory callers(table, /*in_place_io=*/false);
  const int64_t* parts = table.columns().result_offsets;
  std::vector<int32_t> found, mine;
  offsets.reserve(count + 1);
  offsets.push_back(0);
  for (int64_t v = 0; v < count; ++v) {
    mine.clear();
    const auto after_readers = [&](int32_t t) {
      for (const int32_t r : table.readers(t)) {
        if (r != v) mine.push_back(r);
      }
    };
    for (const int32_t t : table.inputs(v)) {
      if (producer[t] >= 0) mine.push_back(producer[t]);
    }
    for (int64_t k = 0; k < table.num_overwrites(v); ++k) {
      after_readers(table.inputs(v)[table.overwrite(v, k).first]);
    }
    for (const int32_t t : table.outputs(v)) {
      for (int64_t p = parts[t]; p < parts[t + 1]; ++p) {
        callers.Overwritten(p, t, &found);
        for (const int32_t other : found) after_readers(other);
      }
    }
    std::sort(mine.begin(), mine.end());
    mine.erase(std::unique(mine.begin(), mine.end()), mine.end());
    tail.insert(tail.end(), mine.begin(), mine.end());
    head.insert(head.end(), mine.size(), static_cast<int32_t>(v));
    offsets.push_back(static_cast<int64_t>(tail.size()));
  }
}

// A serial order that always takes the ready vertex with the smallest key. `ran` is told of each
// vertex, and adds to a list those whose keys have become smaller.
template <typename Key, typename Ran>
std::vector<int32_t> Scheduled(const Needs& needs, const Key& key, const Ran& ran) {
  const auto count = static_cast<int64_t>(needs.offsets.size()) - 1;
  const Successors after(
      {count, static_cast<int64_t>(needs.tail.size()), needs.tail.data(), needs.head.data()});
  std::vector<int32_t> missing = after.waits();
  using Entry = std::pair<decltype(key(0)), int32_t>;
  std::priority_queue<Entry, std::vector<Entry>, std::greater<Entry>> ready;
  for (int32_t v = 0; v < count; ++v) {
    if (missing[v] == 0) ready.emplace(key(v), v);
  }
  std::vector<int32_t> order, changed;
  std::vector<bool> done(count, false);
  order.reserve(count);
  while (!ready.empty()) {
    const int32_t v = ready.top().second;
    ready.pop();
    if (done[v]) continue;
    done[v] = true;
    order.push_back(v);
    changed.clear();
    ran(v, &changed);
    const auto is_waiting = [&](int32_t u) { return done[u] || missing[u] != 0; };
    changed.erase(std::remove_if(changed.begin(), changed.end(), is_waiting), changed.end());
    for (const int32_t* u = after.begin(v); u != after.end(v); ++u) {
      if (--missing[*u] == 0) changed.push_back(*u);
    }
    for (const int32_t u : changed) ready.emplace(key(u), u);
  }
  return order;
}

// Always the vertex after which least more memory is in use: greedy.
std::vector<int32_t> ByMemory(const TaskTable& table, const Needs& needs) {
  const TaskColumns& c = table.columns();
  std::vector<int64_t> left(table.num_tensors());
  std::vector<bool> stays(table.num_tensors());
  for (int64_t t = 0; t < table.num_tensors(); ++t) {
    left[t] = table.readers(t).size();
    stays[t] = table.is_argument(t) || c.result_offsets[t] < c.result_offsets[t + 1];
  }
  const auto key = [&](int32_t v) {
    int64_t more = 0;
    for (int64_t at = c.output_offsets[v]; at < c.output_offsets[v + 1]; ++at) {
      if (table.is_fresh(at)) more += c.bytes[c.outputs[at]];
    }
    for (const int32_t t : table.inputs(v)) {
      if (left[t] == 1 && !stays[t]) more -= c.bytes[t];
    }
    return more;
  };
  return Scheduled(needs, key, [&](int32_t v, std::vector<int32_t>* changed) {
    for (const int32_t t : table.inputs(v)) {
      if (--left[t] == 1) {
        const Row readers = table.readers(t);
        changed->insert(changed->end(), readers.begin(), readers.end());
      }
    }
  });
}

// Always the vertex whose heavy arguments were read last: all micro-batches go through a layer
// before any goes through the next. Empty where that is no question.
std::vector<int32_t> ByArguments(const TaskTable& table, const Needs& needs) {
  int64_t all = 0;
  for (int64_t t = 0; t < table.num_tensors(); ++t) {
    if (table.is_argument(t)) all += table.columns().bytes[t];
  }
  std::vector<bool> heavy(table.num_tensors());
  int64_t num_heavy = 0, num_read_often = 0;
  for (int64_t t = 0; t < table.num_tensors(); ++t) {
    const auto size = static_cast<double>(table.columns().bytes[t]);
    heavy[t] = table.is_argument(t) && size > kHeavy * static_cast<double>(all);
    num_heavy += heavy[t];
    num_read_often += heavy[t] && table.readers(t).size() >= kReaders;
  }
  if (num_heavy == 0 || 2 * num_read_often < num_heavy) return {};
  std::vector<int64_t> read(table.num_tensors(), 0);
  int64_t clock = 0;
  const auto key = [&](int32_t v) {
    int64_t last = 0;
    for (const int32_t t : table.inputs(v)) last = std::max(last, read[t]);
    return -last;
  };
  return Scheduled(needs, key, [&](int32_t v, std::vector<int32_t>* changed) {
    ++clock;
    for (const int32_t t : table.inputs(v)) {
      if (!heavy[t]) continue;
      read[t] = clock;
      const Row readers = table.readers(t);
      changed->insert(changed->end(), readers.begin(), readers.end());
    }
  });
}

// Each vertex as late as its first reader allows, of its needs the one that holds most first (as
// Sethi and Ullman order the operands of an expression).
std::vector<int32_t> DepthFirst(const TaskTable& table, const Needs& needs) {
  const auto count = static_cast<int32_t>(table.num_vertices());
  std::vector<int64_t> most(count, 0);  // bytes of operands and results, its own or of its needs
  std::vector<bool> has_reader(count, false), done(count, false);
  for (int32_t v = 0; v < count; ++v) {
    for (const Row row : {table.inputs(v), table.outputs(v)}) {
      for (const int32_t t : row) most[v] += table.columns().bytes[t];
    }
    for (const int32_t u : needs.before(v)) {
      most[v] = std::max(most[v], most[u]);
      has_reader[u] = true;
    }
  }
  const auto comes_later = [&](int32_t a, int32_t b) {
    return most[a] != most[b] ? most[a] < most[b] : a > b;
  };
  std::vector<int32_t> order, stack;
  order.reserve(count);
  for (int32_t root = 0; root < count; ++root) {
    if (has_reader[root]) continue;
    stack.push_back(root);
    while (!stack.empty()) {
      const int32_t v = stack.back();
      const auto begin = static_cast<std::ptrdiff_t>(stack.size());
      if (!done[v]) {
        for (const int32_t u : needs.before(v)) {
          if (!done[u]) stack.push_back(u);
        }
      }
      if (static_cast<std::ptrdiff_t>(stack.size()) > begin) {
        std::sort(stack.begin() + begin, stack.end(), comes_later);
        continue;
      }
      stack.pop_back();
      if (!done[v]) {
        done[v] = true;
        order.push_back(v);
      }
    }
  }
  return order;
}

// Always the ready vertex with the longest way to the end: list scheduling.
std::vector<int32_t> ByCriticalPath(const Needs& needs, const double* seconds) {
  const auto count = static_cast<int64_t>(needs.offsets.size()) - 1;
  const Successors after(
      {count, static_cast<int64_t>(needs.tail.size()), needs.tail.data(), needs.head.data()});
  const std::vector<double> rest = LongestPaths(after, seconds);
  return Scheduled(
      needs, [&](int32_t v) { return -rest[v]; }, [](int32_t, std::vector<int32_t>*) {});
}

}  // namespace

std::vector<SerialOrder> SerialOrders(const TaskTable& table, const double* seconds) {
  const Needs needs(table);
  std::vector<int32_t> own(table.num_vertices());
  std::iota(own.begin(), own.end(), 0);
  std::vector<SerialOrder> found;
  const auto add = [&](const char* name, std::vector<int32_t> order) {
    const auto is_same = [&](const SerialOrder& other) { return other.vertices == order; };
    if (order.empty() || order == own || std::any_of(found.begin(), found.end(), is_same)) return;
    found.push_back({name, std::move(order)});
  };
  add("memory", ByMemory(table, needs));
  add("depth first", DepthFirst(table, needs));
  add("critical path", ByCriticalPath(needs, seconds));
  add("arguments", ByArguments(table, needs));
  return found;
}

}  // namespace jaxoffload
