// What plans are made with: searches that would be slow in Python, and the lanes' numbers and
// names.

#include <algorithm>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "plan/lanes.h"
#include "planner/best_cuts.h"
#include "planner/order_check.h"
#include "planner/place_intervals.h"
#include "planner/simulate.h"
#include "planner/skyline.h"

namespace jaxoffload {
namespace {

void RequireOneEach(const char* what, const Successors& self, size_t count) {
  if (static_cast<int64_t>(count) == self.num_vertices()) return;
  throw std::invalid_argument(std::string("Successors: ") + what + " has " + std::to_string(count) +
                              " entries, there are " + std::to_string(self.num_vertices()) +
                              " vertices");
}

void BindSuccessors(nb::module_& m) {
  nb::class_<Successors>(m, "Successors")
      .def(
          "__init__",
          [](Successors* self, int64_t num_vertices, const Array<int32_t>& tail,
             const Array<int32_t>& head) {
            RequireEqualSizes("Successors", tail, head);
            const WithoutGil without_gil;
            new (self) Successors(
                {num_vertices, static_cast<int64_t>(tail.size()), tail.data(), head.data()});
          },
          "num_vertices"_a, "tail"_a, "head"_a)
      .def(
          "longest_paths",
          [](const Successors& self, const Array<double>& seconds) {
            RequireOneEach("seconds", self, seconds.size());
            std::vector<double> found;
            {
              const WithoutGil without_gil;
              found = LongestPaths(self, seconds.data());
            }
            return Owned(std::move(found));
          },
          "seconds"_a)
      .def(
          "simulate",
          [](const Successors& self, const Array<double>& seconds, const Array<int32_t>& lane,
             int32_t num_lanes, const Array<double>& priority, bool fixed) {
            RequireOneEach("seconds", self, seconds.size());
            RequireOneEach("lane", self, lane.size());
            RequireOneEach("priority", self, priority.size());
            Times times;
            {
              const WithoutGil without_gil;
              times =
                  Simulate(self, seconds.data(), {lane.data(), priority.data(), num_lanes, fixed});
            }
            return nb::make_tuple(Owned(std::move(times.start)), Owned(std::move(times.end)));
          },
          "seconds"_a, "lane"_a, "num_lanes"_a, "priority"_a, "fixed"_a);
}

void RequireRagged(const char* what, const Array<int64_t>& values, const Array<int64_t>& offsets,
                   size_t num_rows, size_t num_values) {
  const int64_t* at = offsets.data();
  bool fits = offsets.size() == num_rows + 1 && at[0] == 0 &&
              at[num_rows] == static_cast<int64_t>(values.size()) &&
              std::is_sorted(at, at + num_rows + 1);
  for (size_t i = 0; fits && i < values.size(); ++i) {
    fits = values.data()[i] >= 0 && values.data()[i] < static_cast<int64_t>(num_values);
  }
  if (!fits) throw std::invalid_argument(std::string("best_cuts: ") + what + " does not fit");
}

nb::tuple FindCuts(const Array<int64_t>& bytes, const Array<int64_t>& until,
                   const Array<int64_t>& written, const Array<int64_t>& written_offsets,
                   const Array<int64_t>& read, const Array<int64_t>& read_offsets,
                   const Array<int64_t>& alone, const Array<int64_t>& is_elementwise,
                   const Array<int64_t>& is_product, const Array<int64_t>& ends,
                   const Array<double>& crossing, double price, double max_bytes,
                   double where_all_fuse, int64_t max_products) {
  const size_t count = alone.size();
  RequireEqualSizes("best_cuts: values", bytes, until);
  RequireEqualSizes("best_cuts: operations", alone, is_elementwise, is_product, ends);
  RequireRagged("written", written, written_offsets, count, bytes.size());
  RequireRagged("read", read, read_offsets, count, bytes.size());
  if (crossing.size() != count + 1) throw std::invalid_argument("best_cuts: crossing has no end");
  const Stretch stretch{static_cast<int64_t>(count),
                        static_cast<int64_t>(bytes.size()),
                        bytes.data(),
                        until.data(),
                        written.data(),
                        written_offsets.data(),
                        read.data(),
                        read_offsets.data(),
                        alone.data(),
                        is_elementwise.data(),
                        is_product.data(),
                        ends.data(),
                        crossing.data()};
  Cuts cuts;
  {
    const WithoutGil without_gil;
    cuts = BestCuts(stretch, {price, max_bytes, where_all_fuse, max_products});
  }
  return nb::make_tuple(Owned(std::move(cuts.begins)), cuts.least);
}

}  // namespace

void BindPlanner(nb::module_& m) {
  BindSuccessors(m);
  m.def("best_cuts", &FindCuts, "bytes"_a, "until"_a, "written"_a, "written_offsets"_a, "read"_a,
        "read_offsets"_a, "alone"_a, "is_elementwise"_a, "is_product"_a, "ends"_a, "crossing"_a,
        "price"_a, "max_bytes"_a, "where_all_fuse"_a, "max_products"_a);
  m.def(
      "place_intervals",
      [](const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
         const std::vector<int64_t>& size, int64_t capacity, int64_t max_steps) {
        const WithoutGil without_gil;
        return PlaceIntervals(lower, upper, size, capacity, max_steps);
      },
      "lower"_a, "upper"_a, "size"_a, "capacity"_a, "max_steps"_a);
  m.def(
      "place_on_skyline",
      [](const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
         const std::vector<int64_t>& size, const std::vector<int64_t>& order, int64_t capacity) {
        const WithoutGil without_gil;
        return PlaceOnSkyline(lower, upper, size, order, capacity);
      },
      "lower"_a, "upper"_a, "size"_a, "order"_a, "capacity"_a);
  m.def(
      "next_writers",
      [](const Array<int64_t>& memory, const Array<int64_t>& start, const Array<int64_t>& end,
         const Array<int64_t>& time) {
        RequireEqualSizes("next_writers", memory, start, end, time);
        const WrittenRanges ranges{memory.data(), start.data(), end.data(), time.data(),
                                   static_cast<int64_t>(memory.size())};
        std::vector<int64_t> pairs;
        {
          const WithoutGil without_gil;
          pairs = NextWriters(ranges);
        }
        return Owned(std::move(pairs));
      },
      "memory"_a, "start"_a, "end"_a, "time"_a);
  m.def(
      "reaches",
      [](int64_t num_vertices, const Array<int64_t>& tail, const Array<int64_t>& head,
         const Array<int64_t>& from, const Array<int64_t>& to) {
        RequireEqualSizes("reaches: edges", tail, head);
        RequireEqualSizes("reaches: pairs", from, to);
        std::vector<uint8_t> found;
        {
          const WithoutGil without_gil;
          found = Reaches(num_vertices, tail.data(), head.data(), static_cast<int64_t>(tail.size()),
                          from.data(), to.data(), static_cast<int64_t>(from.size()));
        }
        return Owned(std::move(found));
      },
      "num_vertices"_a, "tail"_a, "head"_a, "start"_a, "end"_a);
  nb::list names;
  for (const LaneName& lane : kLaneNames) names.append(lane.name);
  m.attr("lane_names") = nb::tuple(names);
  m.attr("device_lanes") = kDeviceLanes;
  m.def(
      "lane_of",
      [](const Array<uint8_t>& kind, const Array<int32_t>& device, int32_t num_devices) {
        RequireEqualSizes("lane_of", kind, device);
        const Lanes lanes(num_devices);
        std::vector<int32_t> found(kind.size());
        for (size_t v = 0; v < found.size(); ++v) {
          found[v] = lanes.Of(static_cast<Kind>(kind.data()[v]), device.data()[v]);
        }
        return Owned(std::move(found));
      },
      "kind"_a, "device"_a, "num_devices"_a);
}

}  // namespace jaxoffload
