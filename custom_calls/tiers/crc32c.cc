#include "tiers/crc32c.h"

#include <array>
#include <cstring>

// The processor's instruction, for eight bytes and for one, and whether it is there.
#if defined(__x86_64__)
#include <nmmintrin.h>
#define JO_CRC32C_TARGET "sse4.2"
#define JO_CRC32C_WORD(crc, word) _mm_crc32_u64(crc, word)
#define JO_CRC32C_BYTE(crc, byte) _mm_crc32_u8(crc, byte)
#define JO_CRC32C_FOUND __builtin_cpu_supports("sse4.2")
#elif defined(__aarch64__) && defined(__linux__) && defined(__GNUC__)
#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>
#define JO_CRC32C_TARGET "+crc"
#define JO_CRC32C_WORD(crc, word) __crc32cd(static_cast<uint32_t>(crc), word)
#define JO_CRC32C_BYTE(crc, byte) __crc32cb(crc, byte)
#define JO_CRC32C_FOUND ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0)
#endif

namespace jaxoffload {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78;  // Castagnoli's, bits reversed

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ (value & 1 ? kPolynomial : 0);
    table[byte] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = MakeTable();

#if defined(JO_CRC32C_TARGET)
__attribute__((target(JO_CRC32C_TARGET))) uint32_t ByInstruction(const char* data, int64_t bytes) {
  uint64_t crc = ~uint32_t{0};
  int64_t done = 0;
  for (; done + 8 <= bytes; done += 8) {
    uint64_t word;
    std::memcpy(&word, data + done, 8);
    crc = JO_CRC32C_WORD(crc, word);
  }
  auto rest = static_cast<uint32_t>(crc);
  for (; done < bytes; ++done) rest = JO_CRC32C_BYTE(rest, static_cast<uint8_t>(data[done]));
  return ~rest;
}

__attribute__((target(JO_CRC32C_TARGET))) void QuartersByInstruction(const char* data,
                                                                     int64_t quarter,
                                                                     uint32_t* sums) {
  uint64_t crc[4];
  for (uint64_t& each : crc) each = ~uint32_t{0};
  for (int64_t done = 0; done < quarter; done += 8) {
    for (int q = 0; q < 4; ++q) {
      uint64_t word;
      std::memcpy(&word, data + q * quarter + done, 8);
      crc[q] = JO_CRC32C_WORD(crc[q], word);
    }
  }
  for (int q = 0; q < 4; ++q) sums[q] = ~static_cast<uint32_t>(crc[q]);
}

bool HasInstruction() {
  static const bool found = JO_CRC32C_FOUND;
  return found;
}
#endif

}  // namespace

uint32_t Crc32cByTable(const char* data, int64_t bytes) {
  uint32_t crc = ~uint32_t{0};
  for (int64_t i = 0; i < bytes; ++i) {
    crc = kTable[(crc ^ static_cast<uint8_t>(data[i])) & 0xff] ^ (crc >> 8);
  }
  return ~crc;
}

uint32_t Crc32c(const char* data, int64_t bytes) {
#if defined(JO_CRC32C_TARGET)
  if (HasInstruction()) return ByInstruction(data, bytes);
#endif
  return Crc32cByTable(data, bytes);
}

uint32_t QuarteredCrc32c(const char* data, int64_t bytes) {
  const int64_t quarter = bytes / 4;
  uint32_t sums[4];
#if defined(JO_CRC32C_TARGET)
  if (HasInstruction()) {
    QuartersByInstruction(data, quarter, sums);
    return Crc32c(reinterpret_cast<const char*>(sums), sizeof(sums));
  }
#endif
  for (int q = 0; q < 4; ++q) sums[q] = Crc32c(data + q * quarter, quarter);
  return Crc32c(reinterpret_cast<const char*>(sums), sizeof(sums));
}

}  // namespace jaxoffload
