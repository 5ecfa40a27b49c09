// Rows of a table in host memory, taken and put by several threads.

#ifndef JAXOFFLOAD_TIERS_HOST_ROWS_H_
#define JAXOFFLOAD_TIERS_HOST_ROWS_H_

#include <cstdint>

namespace jaxoffload {

// Copies row ids[i] of `table` to row i of `to`. Threads that the system refuses are done without.
void TakeRows(const char* table, const int64_t* ids, int64_t count, int64_t row_bytes, char* to,
              int num_threads);
// Copies row i of `from` to row ids[i] of `table`; no row may be named twice.
void PutRows(char* table, const int64_t* ids, int64_t count, int64_t row_bytes, const char* from,
             int num_threads);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_HOST_ROWS_H_
