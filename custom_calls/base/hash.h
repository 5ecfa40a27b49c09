// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): one step is a good 64-bit hash, repeated steps a
// random stream. Everything random here is a function of (seed, vertex), so a run can be repeated.

#ifndef JAXOFFLOAD_BASE_HASH_H_
#define JAXOFFLOAD_BASE_HASH_H_

#include <cstdint>

namespace jaxoffload {

inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

inline uint64_t Mix(uint64_t a, uint64_t b) { return Mix(Mix(a) ^ b); }

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BASE_HASH_H_
