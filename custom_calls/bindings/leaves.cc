// What the leaves of a call look like, so that the next call is known to be like it without a line
// of Python for each of them.

#include <Python.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "bindings/bindings.h"

namespace jaxoffload {
namespace {

// What is told of some leaves; holds none of them.
class Looks {
 public:
  // `attributes`: what arrays of each type are told apart by.
  Looks(const nb::list& leaves, const nb::dict& attributes) {
    for (auto [type, names] : attributes) {
      Kind kind{nb::borrow(type), {}};
      for (nb::handle name : names) kind.attributes.push_back(nb::borrow(name));
      kinds_.push_back(std::move(kind));
    }
    for (nb::handle leaf : leaves) {
      kind_of_.push_back(KindOf(leaf));
      for (const nb::object& name : kinds_[kind_of_.back()].attributes) {
        values_.push_back(Get(leaf, name));
      }
    }
  }

  // Whether other leaves are of the same types and look the same.
  bool Match(const nb::list& leaves) {
    if (leaves.size() != kind_of_.size()) return false;
    auto value = values_.begin();
    for (size_t i = 0; i < kind_of_.size(); ++i) {
      const nb::handle leaf = PyList_GET_ITEM(leaves.ptr(), static_cast<Py_ssize_t>(i));
      const Kind& kind = kinds_[kind_of_[i]];
      if (!leaf.type().is(kind.type)) return false;
      for (const nb::object& name : kind.attributes) {
        if (!IsSame(Get(leaf, name), *value++)) return false;
      }
    }
    return true;
  }

 private:
  struct Kind {
    nb::object type;
    std::vector<nb::object> attributes;
  };

  size_t KindOf(nb::handle leaf) const {
    size_t kind = 0;
    while (kind < kinds_.size() && !leaf.type().is(kinds_[kind].type)) ++kind;
    if (kind < kinds_.size()) return kind;
    throw nb::type_error("Looks: leaves has one of a type of which attributes says nothing");
  }

  // Of a method, what it returns.
  static nb::object Get(nb::handle leaf, const nb::object& name) {
    nb::object found = nb::steal(PyObject_GetAttr(leaf.ptr(), name.ptr()));
    if (found.is_valid() && PyCallable_Check(found.ptr())) {
      found = nb::steal(PyObject_CallNoArgs(found.ptr()));
    }
    if (!found.is_valid()) throw nb::python_error();
    return found;
  }

  // Most are one object, for results of one program share what does not change from call to call.
  // So of equal ones the latest is kept.
  static bool IsSame(nb::object found, nb::object& known) {
    if (found.is(known)) return true;
    // Held, for what compares may be Python, and another thread may put its own in this place.
    const nb::object other = known;
    const int answer = PyObject_RichCompareBool(found.ptr(), other.ptr(), Py_EQ);
    if (answer < 0) throw nb::python_error();
    if (answer == 1) std::swap(known, found);
    return answer == 1;
  }

  std::vector<Kind> kinds_;
  std::vector<size_t> kind_of_;     // of each leaf
  std::vector<nb::object> values_;  // of each attribute of each leaf
};

// Whether no object is there twice.
bool AreDistinct(const nb::sequence& leaves) {
  const nb::object all = nb::steal(PySequence_Fast(leaves.ptr(), "not a sequence"));
  if (!all.is_valid()) throw nb::python_error();
  PyObject** const items = PySequence_Fast_ITEMS(all.ptr());
  std::vector<const void*> seen(items, items + PySequence_Fast_GET_SIZE(all.ptr()));
  std::sort(seen.begin(), seen.end());
  return std::adjacent_find(seen.begin(), seen.end()) == seen.end();
}

}  // namespace

void BindLeaves(nb::module_& m) {
  nb::class_<Looks>(m, "Looks")
      .def(nb::init<const nb::list&, const nb::dict&>(), "leaves"_a, "attributes"_a)
      .def("match", &Looks::Match, "leaves"_a);
  m.def("are_distinct", &AreDistinct, "leaves"_a);
}

}  // namespace jaxoffload
