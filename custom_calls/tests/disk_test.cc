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
#include "base/thread.h"
#include "tests/check.h"
#include "tests/faulty_disk.h"
#include "tests/fork.h"
#include "tiers/crc32c.h"
#include "tiers/disk_file.h"
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

// The engines that the system has.
std::vector<std::string> Engines() {
  return HasUring() ? std::vector<std::string>{"threads", "io_uring"}
                    : std::vector<std::string>{"threads"};
}

// Calls with what each descriptor of the process refers to.
template <typename F>
void ForEachDescriptor(F&& call) {
  DIR* const folder = opendir("/proc/self/fd");
  while (const dirent* const entry = readdir(folder)) {
    char target[4096] = "";
    const std::string name = std::string("/proc/self/fd/") + entry->d_name;
    if (readlink(name.c_str(), target, sizeof(target) - 1) > 0) {
      call(std::atoi(entry->d_name), std::string(target));
    }
  }
  closedir(folder);
}

// What the blocks of a store's file in a folder take of the disk.
int64_t SpaceTaken(const Folder& folder) {
  int64_t taken = 0;
  ForEachDescriptor([&](int fd, const std::string& target) {
    if (target.compare(0, folder.path().size(), folder.path()) != 0) return;
    struct stat about;
    CHECK_EQ(fstat(fd, &about), 0);
    taken += about.st_blocks * 512 / 16384 * 16384;  // the rest is the file system's own
  });
  return taken;
}

int CountRings() {
  int count = 0;
  ForEachDescriptor([&](int, const std::string& target) {
    if (target.find("io_uring") != std::string::npos) ++count;
  });
  return count;
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

TEST(DiskNeverStartsWhatIsStoppedAlready) {
  const std::atomic<bool> stopped{true};
  for (const std::string& engine : Engines()) {
    const Folder folder;
    const auto store = DiskStore::Open({folder.path()}, Engine(engine));
    const auto extent = store->Reserve(Faulty::kBytes);
    const Memory memory(Faulty::kBytes);
    std::string error;
    CHECK(!extent->Write(0, memory.get(), Faulty::kBytes, stopped, &error));
    CHECK_CONTAINS(error, "stopped");
    CHECK_EQ(store->stats().bytes_written, 0);
    CHECK(MustWrite(*extent, 0, memory.get(), Faulty::kBytes));
    CHECK(!extent->Read(0, memory.get(), Faulty::kBytes, stopped, &error));
    CHECK_CONTAINS(error, "stopped");
    CHECK_EQ(store->stats().bytes_read, 0);
  }
}

// Stops when the first of many requests is done; those behind the ones in flight never start.
TEST(DiskStopsMidway) {
  constexpr size_t kRequests = 64;
  constexpr int64_t kEach = 16384;
  for (const std::string& name : Engines()) {
    std::string error;
    const std::unique_ptr<DiskEngine> engine =
        name == "threads" ? NewThreadEngine(3) : NewUringEngine(8, &error);
    const Folder folder;
    const int fd = open(folder.path().c_str(), O_TMPFILE | O_RDWR, 0600);
    const Memory memory(kRequests * kEach);
    std::vector<DiskRequest> requests(kRequests);
    for (size_t i = 0; i < kRequests; ++i) {
      const auto at = static_cast<int64_t>(i) * kEach;
      requests[i] = {fd, true, at, memory.get() + at, kEach, 0};
    }
    std::atomic<bool> abort{false};
    size_t started = 0;
    size_t ended = 0;
    const auto before = [&](size_t, std::string*) { return ++started > 0; };
    const auto after = [&](size_t, std::string*) {
      abort = true;
      return ++ended > 0;
    };
    CHECK(!engine->Transfer(requests, abort, before, after, &error));
    CHECK_CONTAINS(error, "stopped");
    CHECK(ended >= 1 && ended <= started && started <= 16);
    abort = false;
    CHECK(engine->Transfer(requests, kGoOn, before, after, &error));
    close(fd);
  }
}

TEST(DiskReservesBeforeItIsUsed) {
  const std::vector<Folder> folders(3);
  for (const size_t count : {1, 3}) {
    std::vector<std::string> paths;
    for (size_t i = 0; i < count; ++i) paths.push_back(folders[i].path());
    const std::shared_ptr<DiskStore> store = DiskStore::Open(paths, Engine("threads"));
    for (const int64_t bytes : {int64_t{1} << 50, int64_t{1} << 60, int64_t{1} << 62, INT64_MAX}) {
      CHECK_THROWS(store->Reserve(bytes), folders[0].path());
      CHECK_THROWS(store->Reserve(bytes), "no room for");
      CHECK_EQ(store->stats().reserved_bytes, 0);
    }
    CHECK_THROWS(store->Reserve(-1), "negative");
    const std::shared_ptr<DiskExtent> small = store->Reserve(100);
    CHECK_EQ(store->stats().reserved_bytes, 16384);
    // Seven stripes and a half, of which the first is shared with the small one.
    const std::shared_ptr<DiskExtent> large = store->Reserve(15 << 19);
    int64_t taken = 0;
    for (size_t i = 0; i < count; ++i) {
      taken += SpaceTaken(folders[i]);
      if (count == 3) CHECK(SpaceTaken(folders[i]) >= 2 << 20 && SpaceTaken(folders[i]) <= 3 << 20);
    }
    CHECK_EQ(taken, 16384 + (15 << 19));
  }
}

TEST(DiskGivesSpaceBackAndTakesItAgain) {
  Faulty f;
  const int64_t blocks = Faulty::kBytes;
  const std::shared_ptr<DiskExtent> middle = f.store->Reserve(blocks);
  const std::shared_ptr<DiskExtent> last = f.store->Reserve(blocks);
  CHECK_EQ(f.Write(), std::string());
  CHECK(MustWrite(*middle, 0, f.memory.get(), blocks));
  CHECK(MustWrite(*last, 0, f.memory.get(), blocks));
  CHECK_EQ(SpaceTaken(f.folder), 3 * blocks);
  const int64_t end = f.disk->written_end;
  // Two neighbours, from left to right and from right to left, make one hole that is taken whole.
  for (const bool first_first : {true, false}) {
    std::shared_ptr<DiskExtent> left = f.store->Reserve(blocks);
    std::shared_ptr<DiskExtent> right = f.store->Reserve(blocks);
    const std::shared_ptr<DiskExtent> wall = f.store->Reserve(16384);
    (first_first ? left : right).reset();
    CHECK_EQ(SpaceTaken(f.folder), 4 * blocks + 16384);
    (first_first ? right : left).reset();
    CHECK_EQ(SpaceTaken(f.folder), 3 * blocks + 16384);
    const std::shared_ptr<DiskExtent> both = f.store->Reserve(2 * blocks);
    const Memory memory(2 * blocks);
    CHECK(MustWrite(*both, 0, memory.get(), 2 * blocks));
    CHECK_EQ(f.disk->written_end.load(), end + 2 * blocks);
  }
  CHECK_EQ(SpaceTaken(f.folder), 3 * blocks);
}

TEST(DiskHandsOutOnlyWhatDirectAccessTakes) {
  Faulty f;
  CHECK_EQ(f.Write(), std::string());
  const Memory other(Faulty::kBytes + 8192);
  for (const int64_t skew : {512, 1024, 2048, 1, 4095}) {
    char* const place = other.get() + skew;
    std::memcpy(place, f.memory.get(), 100000);
    CHECK(MustWrite(*f.extent, 0, place, 100000));
    CHECK(MustRead(*f.extent, skew, place, 100000));
    CHECK_EQ(std::memcmp(place, f.memory.get() + skew, 100000), 0);
  }
  CHECK(f.disk->num_calls > 0);
  CHECK_EQ(f.disk->num_misaligned.load(), 0);
}

TEST(DiskWorksWithAsManyThreadsAsThereAre) {
  const Folder folder;
  threads_left = 1;
  const std::shared_ptr<DiskStore> store = DiskStore::Open({folder.path()}, Engine("threads"));
  CHECK_EQ(threads_left.load(), 0);
  CompareWithModel(*store, 1);
  CHECK_THROWS(DiskStore::Open({folder.path()}, Engine("threads")), "ulimit -u");
  threads_left = -1;
}

TEST_APART(DiskIsReadAndNothingElseInAForkedChild) {
  for (const std::string& engine : Engines()) {
    const Folder folder;
    std::shared_ptr<DiskStore> store = DiskStore::Open({folder.path()}, Engine(engine));
    std::shared_ptr<DiskExtent> extent = store->Reserve(Faulty::kBytes);
    std::shared_ptr<DiskExtent> other = store->Reserve(Faulty::kBytes);
    const Memory memory(Faulty::kBytes);
    Fill(memory.get(), Faulty::kBytes, 7);
    const auto is_intact = [&] {
      const Memory found(Faulty::kBytes);
      // Whole blocks, and parts of some.
      for (const int64_t at : {0, 100}) {
        CHECK(MustRead(*extent, at, found.get(), Faulty::kBytes - 2 * at));
        CHECK_EQ(std::memcmp(found.get(), memory.get() + at, Faulty::kBytes - 2 * at), 0);
      }
    };
    CHECK(MustWrite(*extent, 0, memory.get(), Faulty::kBytes));
    CHECK(MustWrite(*other, 0, memory.get(), Faulty::kBytes));
    is_intact();
    const int64_t taken = SpaceTaken(folder);
    MustPassInChild([&] {
      const int rings = CountRings();
      is_intact();
      // Rings of its own, not those that the parent goes on using.
      CHECK_EQ(CountRings(), rings + (engine == "io_uring" ? 1 : 0));
      std::string error;
      CHECK(!extent->Write(0, memory.get(), 16384, kGoOn, &error));
      CHECK_CONTAINS(error, "was forked off process " + std::to_string(getppid()));
      CHECK(!extent->Write(0, memory.get(), 100, kGoOn, &error));
      CHECK_THROWS(store->Reserve(100), "was forked off process " + std::to_string(getppid()));
      extent.reset();
      other.reset();
      store.reset();
      if (!HasUring()) return;  // TSan allows no new threads here
      const auto own = DiskStore::Open({folder.path()}, Engine("io_uring"));
      CHECK(MustWrite(*own->Reserve(16384), 0, memory.get(), 16384));
    });
    CHECK_EQ(SpaceTaken(folder), taken);
    is_intact();
    // What the parent does later the child finds out, and whose doing it was.
    int tell[2];
    CHECK_EQ(pipe(tell), 0);
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      char byte;
      CHECK_EQ(read(tell[0], &byte, 1), 1);
      std::string error;
      const Memory found(Faulty::kBytes);
      CHECK(!other->Read(0, found.get(), Faulty::kBytes, kGoOn, &error));
      CHECK_CONTAINS(error, "has overwritten or deleted it");
      _exit(0);
    }
    other.reset();
    CHECK_EQ(write(tell[1], "x", 1), 1);
    int status = 0;
    CHECK_EQ(waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
    close(tell[0]);
    close(tell[1]);
  }
}

// In a child, for it cannot be undone.
TEST_APART(DiskKeepsItsBytesForChildrenAtTheEnd) {
  const Folder folder;
  MustPassInChild([&] {
    const auto store = DiskStore::Open({folder.path()}, Engine("threads"));
    auto extent = store->Reserve(Faulty::kBytes);
    const int64_t taken = SpaceTaken(folder);
    DiskStore::KeepBytes();
    extent.reset();
    CHECK_EQ(SpaceTaken(folder), taken);
    CHECK_EQ(store->stats().reserved_bytes, 0);
  });
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
  const std::shared_ptr<FileRange> range = DiskFile::Open(path)->Range(11, data.size() - 11);
  for (const auto& [offset, bytes] : std::vector<std::pair<int64_t, int64_t>>{
           {0, 99990}, {1, 4096}, {4085, 4096}, {99989, 1}, {50000, 49990}}) {
    std::vector<char> found(bytes);
    CHECK(MustRead(*range, offset, found.data(), bytes));
    CHECK_EQ(std::memcmp(found.data(), data.data() + 11 + offset, bytes), 0);
  }
  CHECK_THROWS(DiskFile::Open(path)->Range(11, data.size()), "has 100001 bytes");
  CHECK_THROWS(DiskFile::Open(path)->Range(int64_t{1} << 62, int64_t{1} << 62), "has 100001 bytes");
  CHECK_THROWS(DiskFile::Open(path)->Range(INT64_MAX, INT64_MAX), "has 100001 bytes");
  CHECK_THROWS(DiskFile::Open(path)->Range(0, -1), "bytes=-1 must not be negative");
  CHECK_THROWS(DiskFile::Open(path + "x"), "cannot be opened");
  CHECK_THROWS(DiskFile::Open(folder.path()), "no regular file");
  CHECK_THROWS(DiskFile::Open("/dev/zero"), "no regular file");
  const std::string pipe = folder.path() + "/pipe";
  CHECK_EQ(mkfifo(pipe.c_str(), 0600), 0);
  CHECK_THROWS(DiskFile::Open(pipe), "no regular file");
  unlink(pipe.c_str());
  CHECK_EQ(truncate(path.c_str(), 50), 0);
  std::string error;
  char byte;
  CHECK(!range->Read(0, &byte, 1, kGoOn, &error));
  CHECK_CONTAINS(error, "was changed");
  unlink(path.c_str());
}

TEST(FileRangesShareOneDescriptor) {
  const Folder folder;
  const std::string path = folder.path() + "/file";
  std::ofstream(path) << "0123456789";
  std::vector<std::shared_ptr<FileRange>> ranges;
  for (int64_t i = 0; i < 10; ++i) ranges.push_back(DiskFile::Open(path)->Range(i, 1));
  const auto count = [&] {
    int found = 0;
    ForEachDescriptor([&](int, const std::string& target) { found += target == path; });
    return found;
  };
  CHECK_EQ(count(), 10);
  const auto file = DiskFile::Open(path);
  for (int64_t i = 0; i < 10; ++i) ranges[i] = file->Range(i, 1);
  CHECK_EQ(count(), 1);
  char digit;
  CHECK(MustRead(*ranges[7], 0, &digit, 1));
  CHECK_EQ(digit, '7');
  unlink(path.c_str());
}

// It is looked at before and after, for a read of several windows takes its time.
TEST(FileRangeNoticesAChangeDuringARead) {
  const Folder folder;
  const std::string path = folder.path() + "/file";
  const std::vector<char> data(9 << 20, 'x');
  std::ofstream(path).write(data.data(), data.size());
  const auto disk = std::make_shared<FaultyDisk>();
  disk->before_call = [&, calls = std::make_shared<std::atomic<int>>(0)] {
    // The first request of the last window: what was read before is of the old file.
    if (++*calls == 9) std::ofstream(path, std::ios::app) << "more";
  };
  const auto range = DiskFile::Open(path, NewThreadEngine(1, disk))->Range(0, data.size());
  std::vector<char> found(data.size());
  std::string error;
  CHECK(!range->Read(0, found.data(), found.size(), kGoOn, &error));
  CHECK_CONTAINS(error, "was changed");
  CHECK_EQ(disk->num_calls.load(), 9);
  unlink(path.c_str());
}

}  // namespace jaxoffload::testing
