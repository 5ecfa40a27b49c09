// Learning on graphs: rows of tables in host memory, samples of neighbours.

#include "bindings/bindings.h"
#include "bindings/gil.h"
#include "graph/sampler.h"
#include "tiers/host_rows.h"

namespace jaxoffload {
namespace {

template <typename T>
using Bytes = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void RequireTable(size_t table_bytes, const Array<int64_t>& ids, size_t rows_bytes,
                  int64_t row_bytes) {
  if (row_bytes <= 0 || static_cast<size_t>(row_bytes) * ids.size() != rows_bytes) {
    throw std::invalid_argument("row_bytes=" + std::to_string(row_bytes) + " does not make " +
                                std::to_string(ids.size()) + " rows of " +
                                std::to_string(rows_bytes) + " bytes.");
  }
  RequireRows(ids.data(), ids.size(), static_cast<int64_t>(table_bytes) / row_bytes);
}

void Take(const Bytes<const uint8_t>& table, const Array<int64_t>& ids, int64_t row_bytes,
          const Bytes<uint8_t>& to, int num_threads) {
  RequireTable(table.size(), ids, to.size(), row_bytes);
  const WithoutGil without_gil;
  TakeRows(reinterpret_cast<const char*>(table.data()), ids.data(), ids.size(), row_bytes,
           reinterpret_cast<char*>(to.data()), num_threads);
}

void Put(const Bytes<uint8_t>& table, const Array<int64_t>& ids, int64_t row_bytes,
         const Bytes<const uint8_t>& from, int num_threads) {
  RequireTable(table.size(), ids, from.size(), row_bytes);
  const WithoutGil without_gil;
  PutRows(reinterpret_cast<char*>(table.data()), ids.data(), ids.size(), row_bytes,
          reinterpret_cast<const char*>(from.data()), num_threads);
}

nb::tuple Neighbours(const Array<int64_t>& offsets, const Array<int32_t>& sources,
                     const Array<int32_t>& relations, const Array<int32_t>& seeds,
                     const std::vector<int64_t>& fanouts, bool per_relation, uint64_t seed,
                     int num_threads) {
  RequireEqualSizes("sources, relations", sources, relations);
  if (offsets.size() == 0 || offsets.data()[0] != 0 ||
      offsets.data()[offsets.size() - 1] != static_cast<int64_t>(sources.size())) {
    throw std::invalid_argument("offsets do not begin with 0 and end with the number of edges.");
  }
  Sample found;
  {
    const WithoutGil without_gil;
    const EdgeColumns edges{static_cast<int64_t>(offsets.size()) - 1, offsets.data(),
                            sources.data(), relations.data()};
    found = SampleNeighbours(edges, seeds.data(), seeds.size(), fanouts, per_relation, seed,
                             num_threads);
  }
  return nb::make_tuple(Owned(std::move(found.nodes)), Owned(std::move(found.node_offsets)),
                        Owned(std::move(found.sources)), Owned(std::move(found.destinations)),
                        Owned(std::move(found.relations)), Owned(std::move(found.edge_offsets)));
}

}  // namespace

void RequireRows(const int64_t* ids, size_t num_ids, int64_t count) {
  for (size_t i = 0; i < num_ids; ++i) {
    if (ids[i] >= 0 && ids[i] < count) continue;
    throw std::out_of_range("ids[" + std::to_string(i) + "]=" + std::to_string(ids[i]) +
                            " is none of the " + std::to_string(count) + " rows.");
  }
}

void BindGraph(nb::module_& m) {
  m.def("take_rows", &Take, "table"_a, "ids"_a, "row_bytes"_a, "to"_a, "num_threads"_a);
  m.def("put_rows", &Put, "table"_a, "ids"_a, "row_bytes"_a, "values"_a, "num_threads"_a);
  m.def("sample_neighbours", &Neighbours, "offsets"_a, "sources"_a, "relations"_a, "seeds"_a,
        "fanouts"_a, "per_relation"_a, "seed"_a, "num_threads"_a);
}

}  // namespace jaxoffload
