// The disk tier: against a model, with both engines, and on a disk that fails.

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "tests/check.h"
#include "tests/faulty_disk.h"
#include "tiers/crc32c.h"
#include "tiers/disk_store.h"

namespace jaxoffload::testing {
namespace {

const std::atomic<bool> kGoOn{false};

// A folder of its own, removed at the end; it must be empty then.
class Folder {
 public:
  Folder() {
    std::string name = "/tmp/jaxoffload-test-XXXXXX";
    CHECK(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  ~Folder() { CHECK_EQ(rmdir(path_.c_str()), 0); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Page-aligned bytes.
class Memory {
 public:
  explicit Memory(int64_t bytes)
      : data_(static_cast<char*>(std::aligned_alloc(4096, (bytes + 8191) / 4096 * 4096))) {
    std::memset(data_, 0, bytes);
  }
  ~Memory() { std::free(data_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* get() const { return data_; }

 private:
  char* const data_;
};

void Fill(char* data, int64_t bytes, uint64_t seed) {
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<char>(Mix(seed, i));
}

DiskOptions Engine(const std::string& engine) {
  DiskOptions options;
  options.engine = engine;
  options.request_bytes = 65536;
  options.num_threads = 3;
  options.queue_depth = 8;
  return options;
}

bool MustRead(const DiskSource& source, int64_t offset, char* to, int64_t bytes) {
  std::string error;
  const bool ok = source.Read(offset, to, bytes, kGoOn, &error);
  CHECK_EQ(error, std::string());
  return ok;
}

bool MustWrite(DiskExtent& extent, int64_t offset, const char* from, int64_t bytes) {
  std::string error;
  const bool ok = extent.Write(offset, from, bytes, kGoOn, &error);
  CHECK_EQ(error, std::string());
  return ok;
}

// Random writes and reads of any offset and size, aligned and not, beside a model in memory.
void CompareWithModel(DiskStore& store, uint64_t seed) {
  uint64_t state = seed;
  const auto below = [&](int64_t count) {
    state = Mix(state, 1);
    return static_cast<int64_t>((state >> 16) % static_cast<uint64_t>(count));
  };
  for (int round = 0; round < 4; ++round) {
    const int64_t bytes = 1 + below(400000);
    const std::shared_ptr<DiskExtent> extent = store.Reserve(bytes);
    std::vector<char> model(bytes);
    const Memory memory(bytes + 64);
    Fill(model.data(), bytes, below(1 << 30));
    std::memcpy(memory.get(), model.data(), bytes);
    CHECK(MustWrite(*extent, 0, memory.get(), bytes));
    for (int step = 0; step < 12; ++step) {
      const int64_t offset = below(2) == 0 ? below(bytes) : below(bytes / 16384 + 1) * 16384;
      if (offset >= bytes) continue;
      const int64_t length = 1 + below(bytes - offset);
      char* const place = memory.get() + (below(2) == 0 ? 0 : below(64));
      if (below(2) == 0) {
        Fill(place, length, below(1 << 30));
        std::memcpy(model.data() + offset, place, length);
        CHECK(MustWrite(*extent, offset, place, length));
      } else {
        CHECK(MustRead(*extent, offset, place, length));
        CHECK_EQ(std::memcmp(place, model.data() + offset, length), 0);
      }
    }
  }
}

void CompareFromThreads(const std::string& engine, int num_folders) {
  const std::vector<Folder> folders(num_folders);
  std::vector<std::string> paths;
  for (const Folder& folder : folders) paths.push_back(folder.path());
  const std::shared_ptr<DiskStore> store = DiskStore::Open(paths, Engine(engine));
  CHECK_EQ(std::string(store->engine()), engine);
  std::vector<std::thread> threads;
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    threads.emplace_back([&store, seed] { CompareWithModel(*store, seed); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(store->stats().reserved_bytes, 0);
  CHECK(store->stats().bytes_written > 0);
}

bool HasUring() {
  std::string reason;
  return NewUringEngine(4, &reason) != nullptr;
}

struct Faulty {
  Folder folder;
  std::shared_ptr<FaultyDisk> disk = std::make_shared<FaultyDisk>();
  std::shared_ptr<DiskStore> store;
  std::shared_ptr<DiskExtent> extent;
  Memory memory{kBytes};
  static constexpr int64_t kBytes = 1 << 20;

  Faulty() {
    DiskOptions options = Engine("threads");
    options.calls = disk;
    store = DiskStore::Open({folder.path()}, options);
    extent = store->Reserve(kBytes);
    Fill(memory.get(), kBytes, 7);
  }

  std::string Write() {
    std::string error;
    const bool ok = extent->Write(0, memory.get(), kBytes, kGoOn, &error);
    CHECK_EQ(ok, error.empty());
    return error;
  }

  // Reads everything; checks that it is right unless there was an error.
  std::string Read() {
    std::string error;
    const Memory found(kBytes);
    const bool ok = extent->Read(0, found.get(), kBytes, kGoOn, &error);
    CHECK_EQ(ok, error.empty());
    if (ok) CHECK_EQ(std::memcmp(found.get(), memory.get(), kBytes), 0);
    return error;
  }
};

}  // namespace

TEST(Crc32cGivesTheStandardsSums) {
  // RFC 3720, appendix B.4, and the usual check value.
  CHECK_EQ(Crc32c("123456789", 9), 0xe3069283u);
  const std::string zeros(32, '\0');
  const std::string ones(32, '\xff');
  CHECK_EQ(Crc32c(zeros.data(), 32), 0x8a9136aau);
  CHECK_EQ(Crc32c(ones.data(), 32), 0x62a8ab43u);
  std::vector<char> data(1000);
  Fill(data.data(), data.size(), 3);
  for (int64_t bytes = 0; bytes < 1000; bytes += 37) {
    CHECK_EQ(Crc32c(data.data() + 1, bytes / 2), Crc32cByTable(data.data() + 1, bytes / 2));
  }
  uint32_t quarters[4];
  for (int q = 0; q < 4; ++q) quarters[q] = Crc32cByTable(data.data() + q * 240, 240);
  CHECK_EQ(QuarteredCrc32c(data.data(), 960),
           Crc32cByTable(reinterpret_cast<const char*>(quarters), sizeof(quarters)));
}

TEST(DiskThreadsKeepWhatAModelKeeps) { CompareFromThreads("threads", 1); }

TEST(DiskThreadsStripeOverFolders) { CompareFromThreads("threads", 3); }

TEST(DiskUringKeepsWhatAModelKeeps) {
  if (HasUring()) CompareFromThreads("io_uring", 1);
}

TEST(DiskUringStripesOverFolders) {
  if (HasUring()) CompareFromThreads("io_uring", 2);
}

// Writes and reads two megabytes at `place`; returns how many requests took registered buffers.
int64_t FixedRequestsOf(DiskExtent& extent, char* place, uint64_t seed) {
  const int64_t before = FixedMemory::num_requests();
  const int64_t bytes = extent.bytes();
  Fill(place, bytes, seed);
  const std::vector<char> model(place, place + bytes);
  CHECK(MustWrite(extent, 0, place, bytes));
  std::memset(place, 0, bytes);
  CHECK(MustRead(extent, 0, place, bytes));
  CHECK_EQ(std::memcmp(place, model.data(), bytes), 0);
  return FixedMemory::num_requests() - before;
}

TEST(DiskUringTakesRegisteredBuffersWhereItMay) {
  if (!HasUring()) return;
  constexpr int64_t kBytes = 2 << 20;
  const Folder folder;
  const std::shared_ptr<DiskStore> store = DiskStore::Open({folder.path()}, Engine("io_uring"));
  const std::shared_ptr<DiskExtent> extent = store->Reserve(kBytes);
  char* const range = static_cast<char*>(
      mmap(nullptr, 3 * kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  {
    const FixedMemory fixed(range, kBytes);
    CHECK(FixedRequestsOf(*extent, range, 1) > 0);
    CHECK_EQ(FixedRequestsOf(*extent, range + kBytes, 2), 0);
  }
  CHECK_EQ(FixedRequestsOf(*extent, range, 3), 0);
  // Other pages at the same addresses: those that were registered must not be written to.
  CHECK_EQ(madvise(range, kBytes, MADV_DONTNEED), 0);
  {
    const FixedMemory fixed(range, kBytes);
    CHECK(FixedRequestsOf(*extent, range, 4) > 0);
  }
  // What cannot be registered is transferred all the same.
  CHECK_EQ(munmap(range + 2 * kBytes, kBytes), 0);
  {
    const FixedMemory fixed(range, 3 * kBytes);
    CHECK_EQ(FixedRequestsOf(*extent, range, 5), 0);
  }
  munmap(range, 2 * kBytes);
}

TEST(DiskNeighboursInOneBlockDoNotDisturbOneAnother) {
  const Folder folder;
  const std::shared_ptr<DiskStore> store = DiskStore::Open({folder.path()}, Engine("auto"));
  constexpr int64_t kSlice = 36864;  // two blocks and a quarter
  constexpr int64_t kSlices = 5;
  const std::shared_ptr<DiskExtent> extent = store->Reserve(kSlice * kSlices);
  std::vector<std::thread> threads;
  for (int64_t slice = 0; slice < kSlices; ++slice) {
    threads.emplace_back([&extent, slice] {
      const Memory memory(kSlice);
      const Memory found(kSlice);
      for (int round = 0; round < 20; ++round) {
        Fill(memory.get(), kSlice, slice * 100 + round);
        CHECK(MustWrite(*extent, slice * kSlice, memory.get(), kSlice));
        CHECK(MustRead(*extent, slice * kSlice, found.get(), kSlice));
        CHECK_EQ(std::memcmp(found.get(), memory.get(), kSlice), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(DiskCarriesOnAfterShortTransfersAndInterruptions) {
  Faulty f;
  f.disk->most_bytes = 4096;
  f.disk->interruptions = 40;
  CHECK_EQ(f.Write(), std::string());
  f.disk->interruptions = 40;
  CHECK_EQ(f.Read(), std::string());
}

TEST(DiskFailsWithTheCauseAndWorksAgain) {
  Faulty f;
  CHECK_EQ(f.Write(), std::string());
  for (const int error : {EIO, ENOSPC}) {
    f.disk->error = error;
    f.disk->calls_until_error = 3;
    const std::string found = error == EIO ? f.Read() : f.Write();
    CHECK_CONTAINS(found, std::strerror(error));
    CHECK_CONTAINS(found, f.folder.path());
    f.disk->calls_until_error = -1;
    CHECK_EQ(f.Write(), std::string());
    CHECK_EQ(f.Read(), std::string());
  }
}

TEST(DiskNoticesAFlippedBit) {
  Faulty f;
  CHECK_EQ(f.Write(), std::string());
  f.disk->flip_next_read = true;
  CHECK_CONTAINS(f.Read(), "came back changed");
  CHECK_EQ(f.Read(), std::string());
}

TEST(DiskNoticesAWriteThatNeverArrived) {
  Faulty f;
  CHECK_EQ(f.Write(), std::string());
  Fill(f.memory.get(), Faulty::kBytes, 8);
  f.disk->calls_until_error = 5;
  CHECK_CONTAINS(f.Write(), "Input/output error");
  f.disk->calls_until_error = -1;
  // Some blocks are new, some old; none of the old ones may pass for new.
  CHECK_CONTAINS(f.Read(), "came back changed");
}

TEST(DiskRefusesWhatWasNeverWritten) {
  Faulty f;
  CHECK_CONTAINS(f.Read(), "never written");
}

TEST(DiskStopsWhenTheRunStops) {
  Faulty f;
  f.disk->delay_us = 1000;
  std::atomic<bool> abort{false};
  std::string error;
  std::thread stopper([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    abort = true;
  });
  bool ok = true;
  while (ok) ok = f.extent->Write(0, f.memory.get(), Faulty::kBytes, abort, &error);
  stopper.join();
  CHECK_CONTAINS(error, "stopped");
}

TEST(DiskReservesBeforeItIsUsed) {
  const Folder folder;
  const std::shared_ptr<DiskStore> store = DiskStore::Open({folder.path()}, Engine("threads"));
  CHECK_THROWS(store->Reserve(int64_t{1} << 50), folder.path());
  CHECK_EQ(store->stats().reserved_bytes, 0);
  const std::shared_ptr<DiskExtent> small = store->Reserve(100);
  CHECK_EQ(store->stats().reserved_bytes, 16384);
}

TEST(DiskRefusesBadFoldersAndOptions) {
  CHECK_THROWS(DiskStore::Open({"/nonexistent/folder"}, {}), "/nonexistent/folder");
  CHECK_THROWS(DiskStore::Open({"/proc/version"}, {}), "no folder");
  CHECK_THROWS(DiskStore::Open({"/proc"}, {}), "writable");
  CHECK_THROWS(DiskStore::Open({"/tmp"}, Engine("floppy")), "floppy");
  CHECK_THROWS(DiskStore::Open({}, {}), "paths is empty");
  DiskOptions options;
  options.request_bytes = 100;
  CHECK_THROWS(DiskStore::Open({"/tmp"}, options), "request_bytes=100");
}

TEST(FileRangeReadsAnyPartAndNoticesChanges) {
  const Folder folder;
  const std::string path = folder.path() + "/file";
  std::vector<char> data(100001);
  Fill(data.data(), data.size(), 5);
  std::ofstream(path).write(data.data(), data.size());
  const std::shared_ptr<FileRange> range = FileRange::Open(path, 11, data.size() - 11);
  for (const auto& [offset, bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 99990}, {1, 4096}, {4085, 4096}, {99989, 1}, {50000, 49990}}) {
    std::vector<char> found(bytes);
    CHECK(MustRead(*range, offset, found.data(), bytes));
    CHECK_EQ(std::memcmp(found.data(), data.data() + 11 + offset, bytes), 0);
  }
  CHECK_THROWS(FileRange::Open(path, 11, data.size()), "has 100001 bytes");
  CHECK_THROWS(FileRange::Open(path + "x", 0, 1), "cannot be opened");
  CHECK_EQ(truncate(path.c_str(), 50), 0);
  std::string error;
  char byte;
  CHECK(!range->Read(0, &byte, 1, kGoOn, &error));
  CHECK_CONTAINS(error, "was changed");
  unlink(path.c_str());
}

}  // namespace jaxoffload::testing
