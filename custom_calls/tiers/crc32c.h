// CRC32C (RFC 3720), by the processor's own instruction where it has one: about 20 GB/s there, so
// that a check costs a small part of what the disk takes.

#ifndef JAXOFFLOAD_TIERS_CRC32C_H_
#define JAXOFFLOAD_TIERS_CRC32C_H_

#include <cstdint>

namespace jaxoffload {

uint32_t Crc32c(const char* data, int64_t bytes);

// The same by table, for processors without the instruction and for tests.
uint32_t Crc32cByTable(const char* data, int64_t bytes);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_CRC32C_H_
