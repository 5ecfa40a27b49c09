// A simulated range of addresses, and what must be done before each may be used again.
//
// Takes and gives back places; tells for each the MemGraph vertices that must be done before it is
// written: the memory edges of the next tensor there. This is the memory under TURNIP's malloc
// variants (figure 9). Free addresses form extents. An extent consists of pieces, one for each
// former occupant of which some address is free; a piece keeps that occupant's last users.
//
// Places are chosen as in section 6 of the paper (the free slot whose last use is furthest in the
// past), but only among the few tightest extents that fit: with tensors of any size, age alone
// would fragment memory (best fit, then least recently used).

#ifndef JAXOFFLOAD_PLANNER_ADDRESS_SPACE_H_
#define JAXOFFLOAD_PLANNER_ADDRESS_SPACE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace jaxoffload {

// Vertices that must be done, in a pool of the emitter's: made once each, so that two are the same
// if their first are.
struct Dependencies {
  int64_t first = -1;
  int32_t count = 0;
};

// Addresses with one former occupant.
struct Piece {
  int64_t start;
  int64_t end;
  Dependencies after;
  int64_t used;  // the position at which they were last used
};

struct Place {
  int64_t start;
  std::vector<Piece> pieces;  // that it consists of
};

class AddressSpace {
 public:
  // `capacity`: bytes; none for a range that grows (the host tier).
  explicit AddressSpace(std::optional<int64_t> capacity);

  // Takes `size` free bytes; none if no extent is long enough.
  std::optional<Place> Take(int64_t size);
  // Takes these very addresses; none if they are not all free.
  std::optional<Place> TakeAt(int64_t start, int64_t size);
  // Whether nothing has taken any part of a place since it was freed with these dependencies.
  bool IsUntouched(int64_t start, int64_t size, Dependencies after) const;
  // Frees a place; whoever takes it next depends on the vertices in `after`.
  void Give(int64_t start, int64_t size, Dependencies after, int64_t used);
  // Frees a place that was taken and not used; its addresses keep the dependencies that each had.
  void Undo(const Place& place, int64_t size);

  // Where a free extent that starts (ends) at an address ends (starts); else that address.
  int64_t EndOf(int64_t start) const;
  int64_t StartOf(int64_t end) const;
  int64_t free() const { return free_; }

 private:
  struct Rest {
    int64_t end;
    Dependencies after;
    int64_t used;
  };

  Place Carve(int64_t start, int64_t size);
  void Join(int64_t start, int64_t size);
  // The latest last use of the pieces that a place would cover.
  int64_t LastUse(int64_t start, int64_t size) const;
  void Insert(int64_t start, int64_t end);
  void Remove(int64_t start, int64_t end);

  const bool grows_;
  int64_t top_;
  int64_t free_;
  std::map<int64_t, int64_t> extents_;  // start to end
  std::set<std::pair<int64_t, int64_t>> by_size_;
  std::unordered_map<int64_t, Rest> pieces_;  // by start
};

}  // namespace jaxoffload

#endif  // JAXOFFLOAD_PLANNER_ADDRESS_SPACE_H_
