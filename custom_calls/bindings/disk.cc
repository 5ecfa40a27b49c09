// The disk tier: stores, extents, and files of the user's.

#include <atomic>
#include <cerrno>

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "tiers/disk_file.h"
#include "tiers/disk_rows.h"
#include "tiers/disk_store.h"
#include "tiers/row_cache.h"

namespace jaxoffload {
namespace {

[[noreturn]] void ThrowOsError(int code, const std::string& what) {
  PyErr_SetObject(PyExc_OSError, nb::make_tuple(code, what).ptr());
  throw nb::python_error();
}

// What `call` returns; a DiskError of it becomes an OSError.
template <typename F>
auto WithOsErrors(F&& call) {
  try {
    return call();
  } catch (const DiskError& e) {
    ThrowOsError(e.code(), e.what());
  }
}

template <typename T>
using Bytes = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

// Calls `transfer(abort, &error)` without the GIL for so many bytes of a source.
template <typename F>
void Transfer(const DiskSource& source, int64_t offset, size_t bytes, F&& transfer) {
  if (offset < 0 || static_cast<int64_t>(bytes) > source.bytes() - offset) {
    throw std::invalid_argument("offset=" + std::to_string(offset) + " and " +
                                std::to_string(bytes) + " bytes reach beyond the " +
                                std::to_string(source.bytes()) + " that are there.");
  }
  std::string error;
  bool ok;
  {
    const WithoutGil without_gil;
    const std::atomic<bool> abort{false};
    ok = transfer(abort, &error);
  }
  if (!ok) ThrowOsError(EIO, error);
}

void ReadInto(const DiskSource& source, const Bytes<uint8_t>& buffer, int64_t offset) {
  Transfer(source, offset, buffer.size(), [&](const std::atomic<bool>& abort, std::string* error) {
    return source.Read(offset, reinterpret_cast<char*>(buffer.data()), buffer.size(), abort, error);
  });
}

void WriteFrom(DiskExtent& extent, const Bytes<const uint8_t>& buffer, int64_t offset) {
  Transfer(extent, offset, buffer.size(), [&](const std::atomic<bool>& abort, std::string* error) {
    return extent.Write(offset, reinterpret_cast<const char*>(buffer.data()), buffer.size(), abort,
                        error);
  });
}

Rows RowsOf(const DiskSource& source, const Array<int64_t>& ids, int64_t row_bytes,
            size_t buffer_bytes) {
  if (row_bytes <= 0 || static_cast<size_t>(row_bytes) * ids.size() != buffer_bytes) {
    throw std::invalid_argument("row_bytes=" + std::to_string(row_bytes) +
                                " does not make the buffer's length of " +
                                std::to_string(ids.size()) + " rows.");
  }
  RequireRows(ids.data(), ids.size(), source.bytes() / row_bytes);
  for (size_t i = 1; i < ids.size(); ++i) {
    if (ids.data()[i] <= ids.data()[i - 1])
      throw std::invalid_argument("ids must ascend, and have no row twice.");
  }
  return {ids.data(), static_cast<int64_t>(ids.size()), row_bytes};
}

void ReadRows(const DiskSource& source, const Bytes<uint8_t>& buffer, const Array<int64_t>& ids,
              int64_t row_bytes) {
  const Rows rows = RowsOf(source, ids, row_bytes, buffer.size());
  Transfer(source, 0, 0, [&](const std::atomic<bool>& abort, std::string* error) {
    return source.ReadRows(rows, reinterpret_cast<char*>(buffer.data()), abort, error);
  });
}

void WriteRows(DiskExtent& extent, const Bytes<const uint8_t>& buffer, const Array<int64_t>& ids,
               int64_t row_bytes) {
  const Rows rows = RowsOf(extent, ids, row_bytes, buffer.size());
  Transfer(extent, 0, 0, [&](const std::atomic<bool>& abort, std::string* error) {
    return extent.WriteRows(rows, reinterpret_cast<const char*>(buffer.data()), abort, error);
  });
}

void KeepRows(RowCache& cache, const DiskSource& source, const Array<int64_t>& ids) {
  const std::vector<int64_t> rows = ToVector(ids);
  RequireRows(ids.data(), ids.size(), cache.num_rows());
  Transfer(source, 0, 0, [&](const std::atomic<bool>& abort, std::string* error) {
    return cache.Keep(source, rows, abort, error);
  });
}

}  // namespace

void BindDisk(nb::module_& m) {
  nb::class_<RowCache>(m, "RowCache", nb::type_slots(only_made))
      .def(nb::new_([](int64_t bytes, int64_t row_bytes, int64_t room) {
             return std::make_shared<RowCache>(bytes, row_bytes, room);
           }),
           "bytes"_a, "row_bytes"_a, "room"_a)
      .def("keep", &KeepRows, "source"_a, "ids"_a)
      .def("taken", [](const RowCache& cache) { return Owned(cache.taken()); })
      .def("age", &RowCache::Age, "by"_a)
      .def("kept", [](const RowCache& cache) { return Owned(cache.kept()); })
      .def_prop_ro("hits", [](const RowCache& cache) { return cache.counts().hits; })
      .def_prop_ro("misses", [](const RowCache& cache) { return cache.counts().misses; });
  nb::class_<DiskSource>(m, "DiskSource", nb::is_weak_referenceable())
      .def_prop_ro("stamp", &DiskSource::stamp)
      .def_prop_ro("bytes", &DiskSource::bytes)
      .def("read_into", &ReadInto, "buffer"_a, "offset"_a = 0)
      .def("read_rows", &ReadRows, "buffer"_a, "ids"_a, "row_bytes"_a)
      .def(
          "keep_rows_in",
          [](DiskSource& source, const std::shared_ptr<RowCache>& cache) {
            const WithoutGil without_gil;
            return source.KeepRowsIn(cache);
          },
          "cache"_a);
  nb::class_<DiskExtent, DiskSource>(m, "DiskExtent")
      .def("write", &WriteFrom, "buffer"_a, "offset"_a = 0)
      .def("write_rows", &WriteRows, "buffer"_a, "ids"_a, "row_bytes"_a);
  nb::class_<FileRange, DiskSource>(m, "FileRange");
  nb::class_<DiskFile>(m, "DiskFile", nb::is_weak_referenceable(), nb::type_slots(only_made))
      .def(nb::new_([](const std::string& path) {
             return WithOsErrors([&] { return DiskFile::Open(path); });
           }),
           "path"_a)
      .def_prop_ro("bytes", &DiskFile::bytes)
      .def(
          "range",
          [](DiskFile& file, int64_t offset, int64_t bytes) {
            return WithOsErrors([&] { return file.Range(offset, bytes); });
          },
          "offset"_a, "bytes"_a);
  nb::class_<DiskStore>(m, "DiskStore", nb::is_weak_referenceable(), nb::type_slots(only_made))
      .def(nb::new_([](const std::vector<std::string>& paths, const std::string& engine,
                       int queue_depth, int64_t request_bytes) {
             DiskOptions options;
             options.engine = engine;
             options.queue_depth = queue_depth;
             options.request_bytes = request_bytes;
             return WithOsErrors([&] { return DiskStore::Open(paths, options); });
           }),
           "paths"_a, nb::kw_only(), "engine"_a = "auto",
           "queue_depth"_a = DiskOptions().queue_depth,
           "request_bytes"_a = DiskOptions().request_bytes)
      .def_prop_ro("engine", &DiskStore::engine)
      .def_prop_ro("engine_reason", &DiskStore::reason)
      .def_prop_ro("direct", &DiskStore::direct)
      .def("stats",
           [](const DiskStore& store) {
             const DiskStore::Stats stats = store.stats();
             nb::dict found;
             found["reserved_bytes"] = stats.reserved_bytes;
             found["bytes_read"] = stats.bytes_read;
             found["bytes_written"] = stats.bytes_written;
             return found;
           })
      .def(
          "reserve",
          [](DiskStore& store, int64_t bytes) {
            return WithOsErrors([&] {
              const WithoutGil without_gil;
              return store.Reserve(bytes);
            });
          },
          "bytes"_a);
}

}  // namespace jaxoffload
