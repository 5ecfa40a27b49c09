// Other serial orders of a TaskGraph, as candidates for a plan (jaxoffload/search/orders.py, which
// says what each is good for).

#ifndef JAXOFFLOAD_PLANNER_SERIAL_ORDERS_H_
#define JAXOFFLOAD_PLANNER_SERIAL_ORDERS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "planner/task_table.h"

namespace jaxoffload {

struct SerialOrder {
  std::string name;
  std::vector<int32_t> vertices;
};

// Those that differ from the table's own and from one another: "memory", "depth first", "critical
// path", "arguments". `seconds` has an entry for each vertex. O(n log n), but that "depth first"
// sorts the needs of each vertex.
std::vector<SerialOrder> SerialOrders(const TaskTable& table, const double* seconds);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_SERIAL_ORDERS_H_
