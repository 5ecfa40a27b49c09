// What plans are made with: searches that would be slow in Python, and the lanes' numbers and
// names.

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "plan/lanes.h"
#include "planner/order_check.h"
#include "planner/place_intervals.h"
#include "planner/simulate.h"

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

}  // namespace

void BindPlanner(nb::module_& m) {
  BindSuccessors(m);
  m.def(
      "place_intervals",
      [](const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
         const std::vector<int64_t>& size, int64_t capacity, int64_t max_steps) {
        const WithoutGil without_gil;
        return PlaceIntervals(lower, upper, size, capacity, max_steps);
      },
      "lower"_a, "upper"_a, "size"_a, "capacity"_a, "max_steps"_a);
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
