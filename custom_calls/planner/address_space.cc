#include "planner/address_space.h"

#include <algorithm>
#include <iterator>

namespace jaxoffload {
namespace {

constexpr int kCandidates = 4;  // tightest extents among which the one used longest ago is taken
constexpr int kPieces = 8;      // pieces of a candidate whose age is looked at

}  // namespace

AddressSpace::AddressSpace(std::optional<int64_t> capacity)
    : grows_(!capacity), top_(capacity.value_or(0)), free_(top_) {
  if (top_ == 0) return;
  pieces_[0] = {top_, {}, -1};
  Insert(0, top_);
}

std::optional<Place> AddressSpace::Take(int64_t size) {
  if (size == 0) return Place{0, {}};
  auto at = by_size_.lower_bound({size, -1});
  if (at == by_size_.end()) {
    if (!grows_) return std::nullopt;
    top_ += size;
    return Place{top_ - size, {}};
  }
  int64_t start = at->second;
  if (at->first != size || std::next(at) != by_size_.end()) {
    int64_t oldest = LastUse(start, size);
    for (int k = 1; k < kCandidates && ++at != by_size_.end(); ++k) {
      const int64_t used = LastUse(at->second, size);
      if (used >= oldest) continue;
      start = at->second;
      oldest = used;
    }
  }
  return Carve(start, size);
}

std::optional<Place> AddressSpace::TakeAt(int64_t start, int64_t size) {
  if (size == 0) return Place{0, {}};
  auto extent = extents_.upper_bound(start);
  if (extent == extents_.begin()) return std::nullopt;
  const auto [first, end] = *--extent;
  if (start + size > end) return std::nullopt;
  if (first < start) {
    Remove(first, end);
    Insert(first, start);
    Insert(start, end);
    int64_t piece = first;
    while (pieces_.at(piece).end <= start) piece = pieces_.at(piece).end;
    if (piece < start) {
      const Rest whole = pieces_.at(piece);
      pieces_[piece].end = start;
      pieces_[start] = whole;
    }
  }
  return Carve(start, size);
}

bool AddressSpace::IsUntouched(int64_t start, int64_t size, Dependencies after) const {
  const auto piece = pieces_.find(start);
  return piece != pieces_.end() && piece->second.end == start + size &&
         piece->second.after.first == after.first;
}

void AddressSpace::Give(int64_t start, int64_t size, Dependencies after, int64_t used) {
  if (size == 0) return;
  pieces_[start] = {start + size, after, used};
  Join(start, size);
}

void AddressSpace::Undo(const Place& place, int64_t size) {
  if (size == 0) return;
  for (const Piece& piece : place.pieces) {
    pieces_[piece.start] = {piece.end, piece.after, piece.used};
  }
  Join(place.start, size);
}

int64_t AddressSpace::EndOf(int64_t start) const {
  const auto found = extents_.find(start);
  return found == extents_.end() ? start : found->second;
}

int64_t AddressSpace::StartOf(int64_t end) const {
  const auto after = extents_.lower_bound(end);
  if (after == extents_.begin()) return end;
  const auto found = std::prev(after);
  return found->second == end ? found->first : end;
}

void AddressSpace::Join(int64_t start, int64_t size) {
  const int64_t end = start + size, left = StartOf(start), right = EndOf(end);
  free_ += size;
  if (left != start) Remove(left, start);
  if (right != end) Remove(end, right);
  Insert(left, right);
}

int64_t AddressSpace::LastUse(int64_t start, int64_t size) const {
  int64_t latest = -1;
  const int64_t stop = start + size;
  for (int k = 0; k < kPieces && start < stop; ++k) {
    const Rest& piece = pieces_.at(start);
    latest = std::max(latest, piece.used);
    start = piece.end;
  }
  return latest;
}

Place AddressSpace::Carve(int64_t start, int64_t size) {
  const int64_t extent_end = extents_.at(start), stop = start + size;
  free_ -= size;
  Remove(start, extent_end);
  if (stop < extent_end) Insert(stop, extent_end);
  Place place{start, {}};
  for (int64_t at = start; at < stop;) {
    const auto found = pieces_.find(at);
    const Rest piece = found->second;
    pieces_.erase(found);
    place.pieces.push_back({at, std::min(piece.end, stop), piece.after, piece.used});
    if (piece.end > stop) pieces_[stop] = piece;
    at = piece.end;
  }
  return place;
}

void AddressSpace::Insert(int64_t start, int64_t end) {
  extents_[start] = end;
  by_size_.emplace(end - start, start);
}

void AddressSpace::Remove(int64_t start, int64_t end) {
  extents_.erase(start);
  by_size_.erase({end - start, start});
}

}  // namespace jaxoffload
