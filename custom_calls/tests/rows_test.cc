// Rows of tables, in host memory and on disk, and samples of neighbours, by several threads.

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/in_parallel.h"
#include "graph/sampler.h"
#include "tests/check.h"
#include "tiers/disk_gather.h"
#include "tiers/disk_rows.h"
#include "tiers/disk_store.h"
#include "tiers/host_rows.h"
#include "tiers/row_cache.h"

namespace jaxoffload::testing {
namespace {

const std::atomic<bool> kGoOn{false};

// Numbers that are easily told apart.
std::vector<char> Table(int64_t bytes) {
  std::vector<char> found(bytes);
  for (int64_t i = 0; i < bytes; ++i) found[i] = static_cast<char>(i * 131 + i / 251);
  return found;
}

TEST(PartsCoverARangeOnceWhateverTheThreads) {
  for (const int64_t count : {0, 1, 7, 1000}) {
    for (const int threads : {1, 3, 8}) {
      for (const int left : {-1, 1}) {  // the system gives all threads, or one
        threads_left = left;
        std::vector<std::atomic<int>> met(count);
        InParallel(count, threads, 2, [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) ++met[i];
        });
        threads_left = -1;
        for (const auto& times : met) CHECK_EQ(times.load(), 1);
      }
    }
  }
}

TEST(RowsInMemoryByThreads) {
  for (const int64_t row_bytes : {1, 52, 64, 2052}) {
    const int64_t count = (int64_t{18} << 20) / row_bytes / 4;
    const std::vector<char> table = Table(count * row_bytes);
    std::vector<int64_t> ids;
    // Past 16 MiB rows are written in whole lines; here below and above, where they are not too
    // many.
    for (const int64_t taken : {count / 3, row_bytes > 1 ? count * 5 : 1000}) {
      ids.resize(taken);
      for (int64_t i = 0; i < taken; ++i) ids[i] = i * 7919 % count;
      std::vector<char> found(taken * row_bytes + 3, 'x');
      TakeRows(table.data(), ids.data(), taken, row_bytes, found.data() + 1, 4);
      CHECK_EQ(found.front(), 'x');
      CHECK_EQ(found.back(), 'x');
      for (int64_t i = 0; i < taken; i += 97)
        CHECK(std::memcmp(found.data() + 1 + i * row_bytes, table.data() + ids[i] * row_bytes,
                          row_bytes) == 0);
    }
  }
}

TEST(RowsOnDiskWhileOthersReadAndWriteTheirNeighbours) {
  std::string folder = "/tmp/jaxoffload-test-XXXXXX";
  CHECK(mkdtemp(folder.data()) != nullptr);
  {
    const std::shared_ptr<DiskStore> store = DiskStore::Open({folder}, DiskOptions());
    constexpr int64_t kRow = 300, kCount = 4000;
    const std::shared_ptr<DiskExtent> extent = store->Reserve(kRow * kCount);
    std::string error;
    std::vector<char> table = Table(kRow * kCount);
    CHECK(extent->Write(0, table.data(), kRow * kCount, kGoOn, &error));
    // Each thread has every fourth row: blocks are shared by all.
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0};
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        std::vector<int64_t> ids;
        for (int64_t i = t; i < kCount; i += 4 * (1 + t)) ids.push_back(i);
        const Rows rows{ids.data(), static_cast<int64_t>(ids.size()), kRow};
        std::vector<char> mine(rows.count * kRow), found(rows.count * kRow);
        std::string failure;
        for (int turn = 0; turn < 5; ++turn) {
          std::memset(mine.data(), 16 * t + turn, mine.size());
          if (!extent->WriteRows(rows, mine.data(), kGoOn, &failure)) ++wrong;
          if (!extent->ReadRows(rows, found.data(), kGoOn, &failure)) ++wrong;
          if (found != mine) ++wrong;
        }
        if (t > 0) return;
        for (int64_t i = 0; i < rows.count; ++i) {
          std::memset(table.data() + ids[i] * kRow, 16 * t + 4, kRow);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);
    std::vector<char> found(kRow * kCount);
    CHECK(extent->Read(0, found.data(), kRow * kCount, kGoOn, &error));
    for (int64_t i = 0; i < kCount; ++i) {
      const int t = static_cast<int>(i % 4);
      const bool is_written = (i - t) % (4 * (1 + t)) == 0;
      const char want = is_written ? static_cast<char>(16 * t + 4) : table[i * kRow];
      CHECK_EQ(found[i * kRow], want);
    }
    const std::atomic<bool> stop{true};
    const int64_t first = 0;
    CHECK(!extent->ReadRows({&first, 1, kRow}, found.data(), stop, &error));
  }
  CHECK_EQ(rmdir(folder.c_str()), 0);
}

// Every row has one value in all of its bytes, whoever wrote it.
TEST(RowsInMemoryAreThoseOnDiskWhoeverWritesAndWhateverIsKept) {
  std::string folder = "/tmp/jaxoffload-test-XXXXXX";
  CHECK(mkdtemp(folder.data()) != nullptr);
  {
    const std::shared_ptr<DiskStore> store = DiskStore::Open({folder}, DiskOptions());
    constexpr int64_t kRow = 300, kCount = 600, kRoom = 200;
    const std::shared_ptr<DiskExtent> extent = store->Reserve(kRow * kCount);
    const auto cache = std::make_shared<RowCache>(kRow * kCount, kRow, kRoom);
    CHECK(extent->KeepRowsIn(cache));
    CHECK(!extent->KeepRowsIn(std::make_shared<RowCache>(kRow * kCount, kRow, 1)));
    std::string error;
    std::vector<char> table(kRow * kCount, 1);
    CHECK(extent->Write(0, table.data(), kRow * kCount, kGoOn, &error));
    std::vector<std::thread> threads;
    std::atomic<int> wrong{0}, writing{2};
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, t] {
        std::vector<int64_t> ids;  // every third row is written by both, others by one
        for (int64_t i = 0; i < kCount; ++i)
          if (i % 3 == 0 || i % 3 == 1 + t) ids.push_back(i);
        const Rows rows{ids.data(), static_cast<int64_t>(ids.size()), kRow};
        std::vector<char> mine(rows.count * kRow);
        std::string failure;
        for (int turn = 0; turn < 20; ++turn) {
          std::memset(mine.data(), 100 * t + turn, mine.size());
          if (!extent->WriteRows(rows, mine.data(), kGoOn, &failure)) ++wrong;
        }
        --writing;
      });
    }
    threads.emplace_back([&] {
      std::string failure;
      for (int64_t turn = 0; writing > 0; ++turn) {
        std::vector<int64_t> ids;
        for (int64_t i = 0; i < kRoom; ++i) ids.push_back(i * 3 + turn % 2);
        if (!cache->Keep(*extent, ids, kGoOn, &failure)) ++wrong;
      }
    });
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&] {
        std::vector<int64_t> ids;
        for (int64_t i = 0; i < kCount; i += 7) ids.push_back(i);
        const Rows rows{ids.data(), static_cast<int64_t>(ids.size()), kRow};
        std::vector<char> found(rows.count * kRow);
        std::string failure;
        while (writing > 0) {
          if (!extent->ReadRows(rows, found.data(), kGoOn, &failure)) ++wrong;
          for (int64_t i = 0; i < rows.count; ++i)
            for (int64_t k = 1; k < kRow; ++k)
              if (found[i * kRow + k] != found[i * kRow]) ++wrong;
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(wrong.load(), 0);

    std::vector<int64_t> all, some;
    for (int64_t i = 0; i < kCount; ++i) all.push_back(i);
    for (int64_t i = 0; i < kRoom; ++i) some.push_back(i * 2);
    std::vector<char> found(kRow * kCount);
    int64_t read = 0;
    const auto as_on_disk = [&] {
      CHECK(extent->Read(0, table.data(), kRow * kCount, kGoOn, &error));
      CHECK(extent->ReadRows({all.data(), kCount, kRow}, found.data(), kGoOn, &error, &read));
      CHECK(found == table);
    };
    as_on_disk();
    CHECK(cache->Keep(*extent, some, kGoOn, &error));
    CHECK(cache->kept() == some);
    as_on_disk();
    CHECK_EQ(read, kCount - kRoom);

    // A write that fails, and rows of another length: what is kept of those goes.
    const std::atomic<bool> stop{true};
    std::memset(found.data(), 7, found.size());
    CHECK(!extent->WriteRows({some.data(), 3, kRow}, found.data(), stop, &error));
    CHECK_EQ(cache->kept().size(), static_cast<size_t>(kRoom - 3));
    as_on_disk();
    const int64_t half = 2 * some[5] + 1;  // the second half of a row that is kept
    std::memset(found.data(), 8, found.size());
    CHECK(extent->WriteRows({&half, 1, kRow / 2}, found.data(), kGoOn, &error));
    CHECK_EQ(cache->kept().size(), static_cast<size_t>(kRoom - 4));
    as_on_disk();
    CHECK_EQ(read, kCount - kRoom + 4);
    CHECK(!cache->Keep(*extent, all = {1, 3}, stop, &error));
    CHECK(cache->kept().empty());
    CHECK_THROWS(cache->Keep(*extent, all = {3, 1}, kGoOn, &error), "ascend");
    CHECK_THROWS(cache->Keep(*extent, all = {1, 1}, kGoOn, &error), "twice");
    for (int64_t i = 0; i < kRoom; ++i) some.push_back(kRoom * 2 + i);
    CHECK_THROWS(cache->Keep(*extent, some, kGoOn, &error), "400 ids are more than the 200");
    CHECK_THROWS(RowCache(10, 4, 3), "no 3 rows");
    CHECK_THROWS(RowCache(10, 0, 1), "rows of 0");
  }
  CHECK_EQ(rmdir(folder.c_str()), 0);
}

// A table whose rows are written, by whoever is told to, while they are read.
class Busy : public DiskSource {
 public:
  explicit Busy(std::vector<char> bytes) : DiskSource(bytes.size()), all(std::move(bytes)) {}
  int64_t bytes() const override { return static_cast<int64_t>(all.size()); }
  bool Read(int64_t, char*, int64_t, const std::atomic<bool>&, std::string*) const override {
    return false;
  }
  bool ReadRowsFromDisk(const Rows& rows, char* to, const std::atomic<bool>&,
                        std::string*) const override {
    for (int64_t i = 0; i < rows.count; ++i)
      std::memcpy(to + (rows.places == nullptr ? i : rows.places[i]) * rows.bytes,
                  all.data() + rows.ids[i] * rows.bytes, rows.bytes);
    if (meanwhile) meanwhile();
    return true;
  }
  using DiskSource::Writing;
  std::vector<char> all;
  std::function<void()> meanwhile;
};

TEST(RowsAreKeptOnceWritesThatTheCacheHasNotSeenHaveEnded) {
  Busy source(std::vector<char>(40, 1));
  const auto cache = std::make_shared<RowCache>(40, 4, 6);
  std::atomic<bool> is_attached{false};
  std::thread other;
  {
    const Busy::Writing one(source), two(source);
    CHECK(one.cache() == nullptr);
    other = std::thread([&] {
      source.KeepRowsIn(cache);
      is_attached = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!is_attached);
  }
  other.join();
  CHECK(is_attached);
  const Busy::Writing seen(source);
  CHECK(seen.cache() == cache);
}

TEST(RowsInMemoryThatAreWrittenAtOnceAreLetGo) {
  constexpr int64_t kRow = 4, kCount = 10;
  Busy source(std::vector<char>(kRow * kCount, 1));
  const auto cache = std::make_shared<RowCache>(kRow * kCount, kRow, 6);
  const std::vector<int64_t> ids = {2, 3, 5};
  const Rows rows{ids.data(), 3, kRow}, first{ids.data(), 1, kRow};
  std::string error;
  const auto kept = [&](std::vector<int64_t> want) { return cache->kept() == want; };
  const std::vector<char> two(kRow * kCount, 2), three(kRow * kCount, 3);
  CHECK(cache->Keep(source, ids, kGoOn, &error));
  {
    RowCache::Write one(cache, rows), other(cache, first);
    CHECK(kept({}));  // while they are written, they are not taken
    one.Succeeded(two.data());
    other.Succeeded(three.data());
  }
  CHECK(kept({3, 5}));  // nobody knows whose bytes are in row 2
  {
    RowCache::Write one(cache, rows);
    one.Succeeded(two.data());
    RowCache::Write other(cache, 2 * kRow + 1, 1);
  }
  CHECK(kept({3, 5}));
  CHECK(cache->Keep(source, ids, kGoOn, &error));
  CHECK(kept({2, 3, 5}));
  {
    RowCache::Write one(cache, rows);
    one.Succeeded(two.data());
  }
  CHECK(kept({2, 3, 5}));  // as if no two had met
  {
    const RowCache::Write range(cache, 3 * kRow - 1, 2);
  }
  CHECK(kept({5}));
  {
    const RowCache::Write range(cache, 3 * kRow, 0);
    CHECK(kept({5}));
  }

  // What is written while it would be read is not read: it is what has been written.
  {
    RowCache::Write one(cache, rows);
    CHECK(cache->Keep(source, {2, 5, 8}, kGoOn, &error));
    CHECK(kept({8}));
    one.Succeeded(two.data());
  }
  CHECK(kept({2, 5, 8}));
  {
    const RowCache::Write range(cache, 0, kRow * kCount);
    CHECK(cache->Keep(source, {0, 1, 2}, kGoOn, &error));
    CHECK(cache->Keep(source, {1, 5}, kGoOn, &error));  // and those that make room again
  }
  CHECK(kept({}));

  // Nor is what is written between reading it and keeping it, where others are.
  const int64_t fourth = 4;
  source.meanwhile = [&] {
    RowCache::Write one(cache, {&fourth, 1, kRow});
    std::memset(source.all.data() + 4 * kRow, 9, kRow);
    one.Succeeded(source.all.data() + 4 * kRow);
  };
  CHECK(cache->Keep(source, {4, 7}, kGoOn, &error));
  CHECK(kept({4, 7}));
  source.meanwhile = [&] { const RowCache::Write range(cache, 7 * kRow, kRow); };
  CHECK(cache->Keep(source, {4, 6, 7}, kGoOn, &error));
  CHECK(kept({4, 6}));
  source.meanwhile = nullptr;
  std::vector<char> found(2 * kRow, 'x');
  std::vector<int64_t> left, places;
  const std::vector<int64_t> wanted = {4, 5}, turned = {1, 0};
  cache->Take({wanted.data(), 2, kRow, turned.data()}, found.data(), &left, &places);
  CHECK(left == std::vector<int64_t>{5});
  CHECK(places == std::vector<int64_t>{0});
  CHECK_EQ(found[kRow], 9);
  CHECK_EQ(found[kRow - 1], 'x');
  CHECK_EQ(cache->taken()[5], 1.0f);
  cache->Age(0.5f);
  CHECK_EQ(cache->taken()[4], 0.5f);
  CHECK_EQ(cache->counts().hits, 1);
  CHECK_EQ(cache->counts().misses, 1);
}

TEST(RowsOnDiskInAnyOrderAreReadOnceEach) {
  std::string folder = "/tmp/jaxoffload-test-XXXXXX";
  CHECK(mkdtemp(folder.data()) != nullptr);
  {
    const std::shared_ptr<DiskStore> store = DiskStore::Open({folder}, DiskOptions());
    std::string error;
    for (const int64_t row : {1, 300, 16384, 20000}) {
      const int64_t count = row == 1 ? 100000 : 200;
      const std::shared_ptr<DiskExtent> extent = store->Reserve(row * count);
      const std::vector<char> table = Table(row * count);
      CHECK(extent->Write(0, table.data(), row * count, kGoOn, &error));
      // Of the rows from the third on; every second number comes a second time.
      std::vector<int32_t> numbers;
      for (int32_t i = 0; i < 60; ++i) numbers.push_back(i / 2 * 7919 % (count - 3));
      std::vector<char> found(60 * row + 2, 'x');
      const Gather gather{numbers.data(), 60, row, 3};
      CHECK_EQ(GatherFromDisk(*extent, gather, found.data() + 1, kGoOn, &error),
               static_cast<int64_t>(std::set<int32_t>(numbers.begin(), numbers.end()).size()));
      CHECK(found.front() == 'x' && found.back() == 'x');
      for (int64_t i = 0; i < 60; ++i) {
        CHECK(std::memcmp(found.data() + 1 + i * row, table.data() + (numbers[i] + 3) * row, row) ==
              0);
      }
      // Of a row that is named twice the first is written; what lies between stays.
      std::vector<char> given(60 * row), after = table;
      for (size_t i = 0; i < given.size(); ++i) given[i] = static_cast<char>(i / row + 100);
      for (int64_t i = 59; i >= 0; --i) {
        std::memcpy(after.data() + (numbers[i] + 3) * row, given.data() + i * row, row);
      }
      CHECK_EQ(ScatterToDisk(*extent, gather, given.data(), kGoOn, &error),
               static_cast<int64_t>(std::set<int32_t>(numbers.begin(), numbers.end()).size()));
      std::vector<char> now(row * count);
      CHECK(extent->Read(0, now.data(), row * count, kGoOn, &error));
      CHECK(now == after);
      for (const int64_t wrong : {int64_t{-1}, count - 3}) {
        numbers[7] = static_cast<int32_t>(wrong);
        CHECK_EQ(GatherFromDisk(*extent, gather, found.data(), kGoOn, &error), -1);
        CHECK_EQ(error, "row " + std::to_string(wrong) + " is none of a table on disk of " +
                            std::to_string(count - 3) + " rows");
      }
      CHECK_EQ(GatherFromDisk(*extent, {numbers.data(), 0, row, 0}, nullptr, kGoOn, &error), 0);
    }
  }
  CHECK_EQ(rmdir(folder.c_str()), 0);
}

TEST(SamplesAreTheSameWhateverTheThreads) {
  constexpr int64_t kNodes = 3000, kEach = 12;
  std::vector<int64_t> offsets;
  std::vector<int32_t> sources, relations, seeds;
  for (int64_t n = 0; n <= kNodes; ++n) offsets.push_back(n * kEach);
  for (int64_t e = 0; e < kNodes * kEach; ++e) {
    sources.push_back(static_cast<int32_t>(e * 7919 % kNodes));
    relations.push_back(static_cast<int32_t>(e % kEach / 5));
  }
  for (int32_t n = 0; n < 2500; ++n) seeds.push_back(n);
  const EdgeColumns edges{kNodes, offsets.data(), sources.data(), relations.data()};
  for (const bool per_relation : {false, true}) {
    const auto drawn = [&](int threads) {
      return SampleNeighbours(edges, seeds.data(), seeds.size(), {3, 2}, per_relation, 1, threads);
    };
    const Sample one = drawn(1), many = drawn(8);
    CHECK(one.nodes == many.nodes && one.sources == many.sources);
    CHECK(one.destinations == many.destinations && one.relations == many.relations);
    CHECK_EQ(one.edge_offsets[1], (per_relation ? 8 : 3) * 2500);
  }
}

}  // namespace
}  // namespace jaxoffload::testing
