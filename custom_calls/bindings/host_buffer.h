#ifndef JAXOFFLOAD_BINDINGS_HOST_BUFFER_H_
#define JAXOFFLOAD_BINDINGS_HOST_BUFFER_H_

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "base/stamp.h"
#include "tiers/host_block.h"

namespace jaxoffload {

// Memory of the host tier with an address that numpy can look at.
class HostBuffer {
 public:
  explicit HostBuffer(int64_t bytes) : bytes_(bytes) {
    if (bytes < 0) {
      throw std::invalid_argument("HostBuffer: nbytes=" + std::to_string(bytes) + " is negative");
    }
    data_.reset(HostBlock::Global().Allocate(bytes),
                [](char* data) { HostBlock::Global().Free(data); });
  }
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;

  // Of the memory, which runs hold beside Python's object, so that they never need the GIL.
  const std::shared_ptr<char>& data() const { return data_; }
  // Of what is in it.
  const std::shared_ptr<Stamp>& stamp() const { return stamp_; }
  uintptr_t address() const { return reinterpret_cast<uintptr_t>(data_.get()); }
  int64_t bytes() const { return bytes_; }

 private:
  const int64_t bytes_;
  std::shared_ptr<char> data_;
  const std::shared_ptr<Stamp> stamp_ = std::make_shared<Stamp>();
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BINDINGS_HOST_BUFFER_H_
