#ifndef JAXOFFLOAD_BINDINGS_HOST_BUFFER_H_
#define JAXOFFLOAD_BINDINGS_HOST_BUFFER_H_

#include <atomic>
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

  // What keeps the memory for somebody of another library, until it is destroyed; then what is
  // there may be something else.
  class Loan {
   public:
    explicit Loan(const HostBuffer& buffer)
        : data_(buffer.data_), stamp_(buffer.stamp_), count_(buffer.num_loans_) {
      count_->fetch_add(1);
    }
    ~Loan() {
      stamp_->Renew();
      count_->fetch_sub(1);
    }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    const std::shared_ptr<char> data_;
    const std::shared_ptr<Stamp> stamp_;
    const std::shared_ptr<std::atomic<int>> count_;
  };
  int num_loans() const { return num_loans_->load(); }

 private:
  const int64_t bytes_;
  std::shared_ptr<char> data_;
  const std::shared_ptr<Stamp> stamp_ = std::make_shared<Stamp>();
  const std::shared_ptr<std::atomic<int>> num_loans_ = std::make_shared<std::atomic<int>>(0);
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BINDINGS_HOST_BUFFER_H_
