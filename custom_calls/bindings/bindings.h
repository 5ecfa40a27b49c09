// The parts of jaxoffload._native, Python's view of the runtime: arrays in, exceptions out, and the
// GIL let go around everything that can wait. Nothing here is on a hot path but leaves.cc (nanobind
// compiles it for size). Documented in jaxoffload/_native.pyi.

#ifndef JAXOFFLOAD_BINDINGS_BINDINGS_H_
#define JAXOFFLOAD_BINDINGS_BINDINGS_H_

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/gil.h"

namespace jaxoffload {

namespace nb = nanobind;
using nb::literals::operator""_a;

// One for each file of this folder.
void BindClient(nb::module_& m);
void BindPlan(nb::module_& m);
void BindPlanner(nb::module_& m);
void BindMemGraph(nb::module_& m);
void BindHost(nb::module_& m);
void BindDisk(nb::module_& m);
void BindGraph(nb::module_& m);
void BindLeaves(nb::module_& m);

// Copies what any client's runs have left on a device and owe to an array in host memory.
void SettleAll(const char* array);

// Throws std::out_of_range, naming the first that is not in [0, count).
void RequireRows(const int64_t* ids, size_t num_ids, int64_t count);

template <typename T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <typename T>
std::vector<T> ToVector(const Array<T>& array) {
  return std::vector<T>(array.data(), array.data() + array.size());
}

// A read-only view of an array that the report owns.
template <typename T>
nb::object View(nb::handle owner, const std::vector<T>& values) {
  return nb::cast(
      nb::ndarray<nb::numpy, const T, nb::ndim<1>>(values.data(), {values.size()}, owner));
}

// An array that owns its values.
template <typename T>
nb::object Owned(std::vector<T> values) {
  auto kept = std::make_unique<std::vector<T>>(std::move(values));
  const nb::capsule owner(kept.get(), [](void* p) noexcept {
    std::unique_ptr<std::vector<T>>(static_cast<std::vector<T>*>(p));
  });
  return View(owner, *kept.release());
}

// A C++ object for as long as Python's is kept, from any thread. nanobind's own shared_ptr asks for
// the GIL wherever the last of it goes, also in XLA's threads while the interpreter ends (gil.h).
template <typename T>
std::shared_ptr<T> Held(nb::handle object) {
  T* const held = nb::cast<T*>(object);
  return std::shared_ptr<T>(held, [owner = object.inc_ref().ptr()](T*) {
    const WithGil gil;
    if (gil.held()) Py_DECREF(owner);
  });
}

template <typename T, typename... Others>
void RequireEqualSizes(const char* what, const Array<T>& first, const Array<Others>&... others) {
  if (((others.size() == first.size()) && ...)) return;
  throw std::invalid_argument(std::string(what) + ": the arrays differ in length");
}

// For classes that a function makes (nb::new_): object.__new__ would make one with nothing in it,
// on which nanobind ends the process. It alone asks the type for memory.
inline PyObject* RefuseToAllocate(PyTypeObject* type, Py_ssize_t) {
  PyErr_Format(PyExc_TypeError, "object.__new__(%s) is not safe, call %s()", type->tp_name,
               type->tp_name);
  return nullptr;
}

inline PyType_Slot only_made[] = {{Py_tp_alloc, reinterpret_cast<void*>(&RefuseToAllocate)},
                                  {0, nullptr}};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_BINDINGS_BINDINGS_H_
