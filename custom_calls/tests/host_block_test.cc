// The host tier's allocator: against a model, from several threads, and when it is misused.

#include "tiers/host_block.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "base/hash.h"
#include "tests/check.h"

namespace jaxoffload::testing {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

uintptr_t AddressOf(const char* place) { return reinterpret_cast<uintptr_t>(place); }

// Takes and gives back at random; every place is filled with a number of its own, which must still
// be there when it goes, so that no two places overlap.
void TakeAndGive(HostBlock& block, uint64_t seed, int steps) {
  struct Place {
    char* at;
    int64_t bytes;
    unsigned char mark;
  };
  std::vector<Place> places;
  uint64_t state = seed;
  const auto below = [&](uint64_t count) { return (state = Mix(state, 1)) % count; };
  const auto give = [&](size_t which) {
    const Place place = places[which];
    for (int64_t i = 0; i < place.bytes; i += 1021) {
      CHECK_EQ(static_cast<unsigned char>(place.at[i]), place.mark);
    }
    block.Free(place.at);
    places[which] = places.back();
    places.pop_back();
  };
  for (int step = 0; step < steps; ++step) {
    if (places.size() > 20 || (!places.empty() && below(5) < 2)) {
      give(below(places.size()));
      continue;
    }
    const int64_t most = int64_t{1} << (4 + below(19));
    const int64_t bytes = static_cast<int64_t>(below(most));
    Place place{block.Allocate(bytes), bytes, static_cast<unsigned char>(below(256))};
    CHECK_EQ(AddressOf(place.at) % (bytes >= 2 * kMiB ? 2 * kMiB : 4096), 0u);
    std::memset(place.at, place.mark, bytes);
    places.push_back(place);
  }
  while (!places.empty()) give(places.size() - 1);
}

// Whether a child process that does this is ended by abort().
template <typename F>
bool Aborts(F&& misuse) {
  const pid_t child = fork();
  if (child == 0) {
    std::freopen("/dev/null", "w", stderr);
    misuse();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return !(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace

TEST(HostBlockKeepsPlacesApart) {
  HostBlock block(64 * kMiB, 1024 * kMiB);
  TakeAndGive(block, 1, 3000);
  const HostBlock::Stats stats = block.stats();
  CHECK_EQ(stats.in_use_bytes, 0);
  CHECK_EQ(stats.hole_bytes, 0);
  CHECK_EQ(stats.num_allocated, stats.num_freed);
  CHECK(stats.peak_bytes > 0 && stats.kept_bytes <= 64 * kMiB);
  // Everything has grown together again: the whole can be had at once.
  block.Free(block.Allocate(1000 * kMiB));
}

TEST(HostBlockServesSeveralThreads) {
  HostBlock block(8 * kMiB, 1024 * kMiB);
  std::vector<std::thread> threads;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    threads.emplace_back([&block, seed] { TakeAndGive(block, seed, 400); });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(block.stats().in_use_bytes, 0);
  block.Free(block.Allocate(1000 * kMiB));
}

TEST(HostBlockReusesPlacesAndKeepsNoMoreThanItsCap) {
  HostBlock block(6 * kMiB, 1024 * kMiB);
  char* const first = block.Allocate(4 * kMiB);
  std::memset(first, 1, 4 * kMiB);
  block.Free(first);
  CHECK_EQ(block.stats().kept_bytes, 4 * kMiB);
  CHECK_EQ(block.Allocate(4 * kMiB), first);
  char* const second = block.Allocate(4 * kMiB);
  block.Free(first);
  block.Free(second);
  CHECK(block.stats().kept_bytes <= 6 * kMiB);
  block.SetCap(0);
  CHECK_EQ(block.stats().kept_bytes, 0);
  CHECK_EQ(block.Allocate(4 * kMiB)[0], 0);  // a fresh page
}

TEST(HostBlockKeepsWhatAPlanExpects) {
  HostBlock block(kMiB, 64 * kMiB);
  block.Expect(8 * kMiB);
  block.Expect(4 * kMiB);
  block.Free(block.Allocate(8 * kMiB));
  CHECK_EQ(block.stats().kept_bytes, 8 * kMiB);
  block.Forget(4 * kMiB);
  CHECK_EQ(block.stats().kept_bytes, 8 * kMiB);
  block.Forget(8 * kMiB);
  CHECK(block.stats().kept_bytes <= kMiB);
}

TEST(HostBlockTakesNoMoreThanWholePages) {
  HostBlock block(0, 64 * kMiB);
  const int64_t bytes = 2 * kMiB + 4096;
  for (const int64_t before : {bytes, 4 * kMiB}) {  // where another place had a huge page, too
    char* const first = block.Allocate(before);
    std::memset(first, 1, before);
    block.Free(first);
    char* const place = block.Allocate(bytes);
    CHECK_EQ(place, first);
    CHECK_EQ(block.stats().in_use_bytes, bytes);
    std::memset(place, 1, bytes);
    unsigned char resident[1024];
    CHECK_EQ(mincore(place, 4 * kMiB, resident), 0);
    int64_t num_resident = 0;
    for (const unsigned char page : resident) num_resident += page & 1;
    CHECK_EQ(num_resident * 4096, bytes);
    block.Free(place);
  }
}

TEST(HostBlockTellsOfHoles) {
  HostBlock block(64 * kMiB, 1024 * kMiB);
  std::vector<char*> places;
  for (int i = 0; i < 8; ++i) places.push_back(block.Allocate(16384));
  block.Free(places[1]);
  block.Free(places[3]);
  block.Free(places[4]);
  CHECK_EQ(block.stats().hole_bytes, 3 * 16384);
  CHECK_EQ(block.stats().largest_hole_bytes, 2 * 16384);
}

TEST(HostBlockRefusesWhatDoesNotFit) {
  HostBlock block(kMiB, 64 * kMiB);
  for (const int64_t bytes :
       {128 * kMiB, int64_t{-1}, int64_t{1} << 62, INT64_MAX - 4096, INT64_MAX, INT64_MIN}) {
    bool refused = false;
    try {
      block.Allocate(bytes);
    } catch (const std::bad_alloc&) {
      refused = true;
    }
    CHECK(refused);
  }
  char* const place = block.Allocate(0);
  for (const int64_t bytes : {INT64_MAX, INT64_MAX - 4096, int64_t{-1}}) {
    CHECK(!block.IsPinned(place, bytes));
  }
  block.Free(place);
  block.Expect(INT64_MAX);
  block.Free(block.Allocate(8 * kMiB));
  CHECK_EQ(block.stats().kept_bytes, 8 * kMiB);
  block.Forget(INT64_MAX);
  CHECK(block.stats().kept_bytes <= kMiB);
}

TEST_APART(HostBlockEndsTheProcessWhenMisused) {
  HostBlock block(kMiB, 64 * kMiB);
  char* const place = block.Allocate(8192);
  CHECK(!Aborts([&] { block.Free(place); }));
  CHECK(Aborts([&] { block.Free(place + 4096); }));
  CHECK(Aborts([&] { block.Free(place + 1); }));
  CHECK(Aborts([&] {
    block.Free(place);
    block.Free(place);
  }));
}

}  // namespace jaxoffload::testing
