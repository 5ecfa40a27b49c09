// Addresses of the process that nothing else gets, without memory behind them until they are used.
//
// Arenas and the host tier's block each have one: it never moves, so the addresses of places hold
// for as long as it lives. Thread-safe where the callers' bytes are apart.

#ifndef JAXOFFLOAD_TIERS_ADDRESS_RANGE_H_
#define JAXOFFLOAD_TIERS_ADDRESS_RANGE_H_

#include <cstdint>

namespace jaxoffload {

class AddressRange {
 public:
  // Up to `wanted_bytes` from a multiple of kHugePage on: half as many, and so on, where a limit on
  // address space (ulimit -v) forbids more. None, with errno set, where there is not a huge page.
  explicit AddressRange(int64_t wanted_bytes);
  ~AddressRange();
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;

  char* base() const { return base_; }
  int64_t bytes() const { return bytes_; }

  // Lets the first `bytes` be read and written; pages come when they are touched. False, with errno
  // set, where the system refuses.
  bool Open(int64_t bytes) const;
  // Gives the pages of [begin, end), which must be open, back to the system. They read as zeros.
  void Discard(int64_t begin, int64_t end) const;

 private:
  char* base_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_TIERS_ADDRESS_RANGE_H_
