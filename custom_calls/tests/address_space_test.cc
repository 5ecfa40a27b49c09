// The simulated range of addresses against a map of bytes that remembers everything.

#include "planner/address_space.h"

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "tests/check.h"

namespace jaxoffload::testing {
namespace {

constexpr int64_t kCapacity = 24;
constexpr int64_t kMost = 400;  // of a range that grows

struct Byte {
  bool busy = false;
  int64_t vertex = -1;  // that must be done, and when it was last used
  int64_t used = -1;
};

// Takes and gives at random; every place that is taken must be free, and know the former occupants
// of each of its bytes.
void Exercise(std::mt19937& random, bool grows) {
  AddressSpace space(grows ? std::nullopt : std::optional<int64_t>(kCapacity));
  std::vector<Byte> bytes(kMost);
  std::map<int64_t, int64_t> taken;  // start to size
  for (int64_t step = 1; step < 60; ++step) {
    if (!taken.empty() && random() % 100 < 45) {
      const auto [start, size] = *std::next(taken.begin(), random() % taken.size());
      taken.erase(start);
      space.Give(start, size, {step, 1}, step);
      for (int64_t a = start; a < start + size; ++a) bytes[a] = {false, step, step};
      CHECK(space.IsUntouched(start, size, {step, 1}));
      continue;
    }
    const auto size = static_cast<int64_t>(random() % 10);
    const bool chosen = !grows && random() % 4 == 0;
    const auto wish = static_cast<int64_t>(random() % (kCapacity - size + 1));
    bool fits = false;
    for (int64_t start = 0; start + size <= kCapacity; ++start) {
      bool is_free = true;
      for (int64_t a = start; a < start + size; ++a) is_free &= !bytes[a].busy;
      fits |= is_free && (!chosen || start == wish || size == 0);
    }
    const std::optional<Place> found = chosen ? space.TakeAt(wish, size) : space.Take(size);
    CHECK(found.has_value() == (fits || grows));
    if (!found || size == 0) continue;
    CHECK(grows || found->start + size <= kCapacity);
    CHECK(!chosen || found->start == wish);
    std::set<int64_t> want, known;
    for (int64_t a = found->start; a < found->start + size; ++a) {
      CHECK(!bytes[a].busy);
      if (bytes[a].vertex >= 0) want.insert(bytes[a].vertex);
    }
    int64_t at = found->start;
    for (const Piece& piece : found->pieces) {
      CHECK_EQ(piece.start, at);
      at = piece.end;
      if (piece.after.count > 0) known.insert(piece.after.first);
      CHECK_EQ(bytes[piece.start].used, piece.used);
    }
    CHECK(known == want);
    CHECK(at == found->start + size || (grows && found->pieces.empty()));
    if (random() % 5 == 0 && !found->pieces.empty()) {
      space.Undo(*found, size);
      continue;
    }
    for (int64_t a = found->start; a < found->start + size; ++a) bytes[a].busy = true;
    taken[found->start] = size;
  }
  if (grows) return;
  int64_t free = kCapacity;
  for (const auto& [start, size] : taken) free -= size;
  CHECK_EQ(space.free(), free);
}

TEST(AddressSpaceGivesFreePlacesThatKnowTheirFormerOccupants) {
  std::mt19937 random(5);
  for (int round = 0; round < 400; ++round) Exercise(random, round % 2 == 0);
}

// TURNIP, section 6.
TEST(AddressSpaceTakesThePlaceThatIsUnusedLongest) {
  AddressSpace space(5);
  for (int k = 0; k < 5; ++k) space.Take(1);
  space.Give(0, 1, {3, 1}, 3);
  space.Give(2, 1, {1, 1}, 1);
  space.Give(4, 1, {2, 1}, 2);
  for (const int64_t start : {2, 4, 0}) CHECK_EQ(space.Take(1)->start, start);
}

}  // namespace
}  // namespace jaxoffload::testing
