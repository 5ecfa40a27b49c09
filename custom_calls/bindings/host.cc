// The host tier.

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "bindings/host_buffer.h"
#include "tiers/disk_engine.h"
#include "tiers/host_block.h"

namespace jaxoffload {

void BindHost(nb::module_& m) {
  nb::class_<HostBuffer>(m, "HostBuffer", nb::is_weak_referenceable())
      .def(nb::init<int64_t>(), "nbytes"_a)
      .def_prop_ro("address", &HostBuffer::address)
      .def_prop_ro("nbytes", &HostBuffer::bytes)
      .def("__len__", &HostBuffer::bytes)
      .def_prop_ro("num_loans", &HostBuffer::num_loans)
      .def(
          "lend",
          [](const HostBuffer& buffer, const std::vector<size_t>& shape, uint8_t code,
             uint8_t bits) {
            const nb::capsule owner(new HostBuffer::Loan(buffer), [](void* loan) noexcept {
              delete static_cast<HostBuffer::Loan*>(loan);
            });
            return nb::ndarray<nb::array_api>(buffer.data().get(), shape.size(), shape.data(),
                                              owner, nullptr, nb::dlpack::dtype{code, bits, 1},
                                              nb::device::cpu::value);
          },
          "shape"_a, "code"_a, "bits"_a)
      .def_prop_ro("stamp", [](const HostBuffer& buffer) { return buffer.stamp()->value(); })
      .def("renew_stamp", [](const HostBuffer& buffer) { buffer.stamp()->Renew(); })
      .def_prop_ro("__array_interface__", [](const HostBuffer& buffer) {
        if (buffer.stamp()->may_be_owed()) {
          const WithoutGil without_gil;
          SettleAll(buffer.data().get());
        }
        nb::dict found;
        found["version"] = 3;
        found["shape"] = nb::make_tuple(buffer.bytes());
        found["typestr"] = "|u1";
        found["data"] = nb::make_tuple(buffer.address(), false);
        return found;
      });
  m.def("host_stats", [] {
    const HostBlock::Stats stats = HostBlock::Global().stats();
    nb::dict found;
    found["in_use_bytes"] = stats.in_use_bytes;
    found["peak_bytes"] = stats.peak_bytes;
    found["kept_bytes"] = stats.kept_bytes;
    found["hole_bytes"] = stats.hole_bytes;
    found["largest_hole_bytes"] = stats.largest_hole_bytes;
    found["num_allocated"] = stats.num_allocated;
    found["num_freed"] = stats.num_freed;
    found["pinned_bytes"] = stats.pinned_bytes;
    found["num_pin_failures"] = stats.num_pin_failures;
    found["num_unpin_failures"] = stats.num_unpin_failures;
    found["num_fixed_requests"] = FixedMemory::num_requests();
    return found;
  });
  m.def(
      "host_is_pinned",
      [](uintptr_t address, int64_t bytes) {
        return HostBlock::Global().IsPinned(reinterpret_cast<const char*>(address), bytes);
      },
      "address"_a, "nbytes"_a);
  m.def("host_release", [] { HostBlock::Global().ReleaseFree(); }, nb::call_guard<WithoutGil>());
  m.def(
      "host_set_cap", [](int64_t bytes) { HostBlock::Global().SetCap(bytes); }, "nbytes"_a,
      nb::call_guard<WithoutGil>());
}

}  // namespace jaxoffload
