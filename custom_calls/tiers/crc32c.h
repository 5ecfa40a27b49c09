// CRC32C (RFC 3720), by the processor's own instruction where it has one, so that a check costs a
// small part of what the disk takes.

#ifndef JAXOFFLOAD_TIERS_CRC32C_H_
#define JAXOFFLOAD_TIERS_CRC32C_H_

#include <cstdint>

namespace jaxoffload {

uint32_t Crc32c(const char* data, int64_t bytes);

// The CRC32C of the four CRC32Cs of the quarters of `data`, in the byte order of the machine: the
// instruction takes three cycles, and four chains of it go on side by side. `bytes` is a multiple
// of 32.
uint32_t QuarteredCrc32c(const char* data, int64_t bytes);

// As Crc32c, by table: for processors without the instruction and for tests.
uint32_t Crc32cByTable(const char* data, int64_t bytes);

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_CRC32C_H_
