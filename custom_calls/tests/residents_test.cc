// What runs leave for others: found where it is the same, paid before it is lost.

#include "tiers/residents.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "base/stamp.h"
#include "tests/check.h"

namespace jaxoffload::testing {
namespace {

using Found = Residents::Found;

// A map, and who was paid.
struct Ledger {
  Residents residents;
  std::vector<int64_t> paid;  // starts of places
  Residents::Pay pay = [this](const Resident& each) { paid.push_back(each.start); };

  Found Keep(const Resident& wanted, bool changes = false, std::vector<char*> read = {}) {
    return residents.Keep({1000}, read, {{wanted, changes}}, pay)[0];
  }
  void KeepNothing(int64_t used, std::vector<char*> read = {}) {
    residents.Keep({used}, read, {}, pay);
  }
};

Resident Part(int64_t start, uint64_t stamp = 7) { return {0, start, 100, stamp, 0}; }

struct Array {
  std::shared_ptr<char> data{new char[8], std::default_delete<char[]>()};

  Resident Owed(int64_t start) const {
    Resident part = Part(start);
    part.owed_to = data.get();
    part.owner = data;
    return part;
  }
};

TEST(WhatIsTheSameIsFound) {
  Ledger ledger;
  CHECK(ledger.Keep(Part(500)) == Found::kNo);
  ledger.residents.Add(Part(500));
  CHECK(ledger.Keep(Part(500)) == Found::kYes);
  CHECK(ledger.Keep(Part(500)) == Found::kYes);
  CHECK(ledger.Keep(Part(500, 8)) == Found::kNo);  // another stamp: and now it is gone
  CHECK(ledger.Keep(Part(500)) == Found::kNo);
}

TEST(EachDifferenceCounts) {
  for (int which = 0; which < 5; ++which) {
    Ledger ledger;
    ledger.residents.Add(Part(500));
    Resident other = Part(500);
    if (which == 0) other.device = 1;
    if (which == 1) other.start = 400;
    if (which == 2) other.bytes = 99;
    if (which == 3) other.stamp = kNoStamp;
    if (which == 4) other.part_start = 64;
    CHECK(ledger.Keep(other) == Found::kNo);
  }
}

TEST(WhatHasNoStampIsNeverFound) {
  Ledger ledger;
  ledger.residents.Add(Part(500, kNoStamp));
  CHECK(ledger.Keep(Part(500, kNoStamp)) == Found::kNo);
}

TEST(WhatIsBeyondAnotherPlanStays) {
  Ledger ledger;
  ledger.residents.Add(Part(500));
  ledger.KeepNothing(500);
  CHECK(ledger.residents.Has(Part(500)));
  ledger.KeepNothing(501);
  CHECK(!ledger.residents.Has(Part(500)));
}

TEST(WhatChangesIsGoneUntilItIsAddedAgain) {
  Ledger ledger;
  ledger.residents.Add(Part(500));
  CHECK(ledger.Keep(Part(500), true) == Found::kYes);
  CHECK(ledger.Keep(Part(500), true) == Found::kNo);
}

TEST(WhatGivesWayIsFoundOnceUntilItIsAddedAgain) {
  Ledger ledger;
  const auto keep = [&](bool gives_way) {
    const Residents::Wanted wanted{Part(500), false, false, gives_way};
    return ledger.residents.Keep({1000}, {}, {wanted}, ledger.pay)[0];
  };
  ledger.residents.Add(Part(500));
  CHECK(keep(false) == Found::kYes);
  CHECK(keep(true) == Found::kYes);
  CHECK(keep(true) == Found::kNo);
  ledger.residents.Add(Part(500));
  CHECK(keep(true) == Found::kYes);
  CHECK(ledger.residents.empty());
}

TEST(ADebtIsPaidBeforeItsPlaceGivesWay) {
  Ledger ledger;
  Array array;
  ledger.residents.Add(array.Owed(500));
  const Residents::Wanted wanted{Part(500), false, false, true};
  const Residents::Pay fails = [](const Resident&) { throw std::runtime_error("no device"); };
  bool failed = false;
  try {
    ledger.residents.Keep({1000}, {}, {wanted}, fails);
  } catch (const std::runtime_error&) {
    failed = true;
  }
  CHECK(failed);
  CHECK(ledger.residents.Owes(array.data.get()));  // nothing has changed
  // It is there still, and in the array as well, where it is brought from at the end.
  CHECK(ledger.residents.Keep({1000}, {}, {wanted}, ledger.pay)[0] == Found::kYes);
  CHECK_EQ(ledger.paid.size(), 1u);
  CHECK(!ledger.residents.Owes(array.data.get()));
  CHECK(ledger.residents.empty());
}

TEST(DebtsArePaidBeforeTheirPlaceIsTaken) {
  Ledger ledger;
  Array array;
  ledger.residents.Add(array.Owed(500));
  CHECK(ledger.residents.Owes(array.data.get()));
  ledger.KeepNothing(400);
  CHECK(ledger.paid.empty());
  ledger.KeepNothing(1000);
  CHECK_EQ(ledger.paid.size(), 1u);
  CHECK(ledger.residents.empty());
}

TEST(DebtsArePaidBeforeTheirArrayIsRead) {
  Ledger ledger;
  Array array;
  ledger.residents.Add(array.Owed(500));
  ledger.KeepNothing(400, {array.data.get()});
  CHECK_EQ(ledger.paid.size(), 1u);
  CHECK(ledger.residents.Has(Part(500)));
  CHECK(!ledger.residents.Owes(array.data.get()));
  ledger.residents.Settle(array.data.get(), ledger.pay);
  CHECK_EQ(ledger.paid.size(), 1u);  // once
}

TEST(AWantedDebtIsFoundAndStaysOne) {
  Ledger ledger;
  Array array;
  ledger.residents.Add(array.Owed(500));
  CHECK(ledger.Keep(Part(500), false, {array.data.get()}) == Found::kOwed);
  CHECK(ledger.paid.empty());
  ledger.residents.Settle(array.data.get(), ledger.pay);
  CHECK_EQ(ledger.paid.size(), 1u);
}

TEST(ADebtIsPaidWhereItsArrayIsReadBesideItsPlace) {
  Ledger ledger;
  Array array;
  ledger.residents.Add(array.Owed(500));
  const auto keep = [&](std::vector<char*> read) {
    return ledger.residents.Keep({1000}, read, {{Part(500), false, true}}, ledger.pay)[0];
  };
  CHECK(keep({}) == Found::kOwed);  // another array of the same bytes is read: nobody is owed there
  CHECK(ledger.paid.empty());
  CHECK(keep({array.data.get()}) == Found::kYes);
  CHECK_EQ(ledger.paid.size(), 1u);
  CHECK(ledger.residents.Has(Part(500)));
}

TEST(NobodyIsPaidWhoIsGone) {
  Ledger ledger;
  {
    Array array;
    ledger.residents.Add(array.Owed(500));
  }
  ledger.KeepNothing(1000);
  CHECK(ledger.paid.empty());
}

TEST(WhatCannotBePaidIsKeptOrTold) {
  Ledger ledger;
  Array array;
  const Residents::Pay fails = [](const Resident&) { throw std::runtime_error("no device"); };
  const auto is_told = [&](const Residents::Pay& pay) {
    try {
      ledger.residents.Settle(array.data.get(), pay);
    } catch (const std::runtime_error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  ledger.residents.Add(array.Owed(500));
  CHECK_EQ(is_told(fails), "no device");
  CHECK(ledger.residents.Owes(array.data.get()));  // nothing was lost yet
  ledger.residents.ForgetBeyond(0, 550, fails);
  CHECK(ledger.residents.empty());
  CHECK_EQ(is_told(ledger.pay), "bytes that were left on the device are lost: no device");
  bool refused = false;
  try {
    ledger.KeepNothing(0, {array.data.get()});
  } catch (const std::runtime_error&) {
    refused = true;
  }
  CHECK(refused);
  CHECK_EQ(ledger.residents.num_lost(), 1u);
  array.data.reset();
  ledger.residents.ForgetBeyond(0, 550, fails);
  CHECK_EQ(ledger.residents.num_lost(), 0u);  // its array is gone
}

TEST(ForgettingPaysFirst) {
  Ledger ledger;
  Array array;
  ledger.residents.Add(array.Owed(500));
  ledger.residents.Add(Part(700));
  ledger.residents.Forget({Part(500)}, ledger.pay);
  CHECK_EQ(ledger.paid.size(), 1u);
  ledger.residents.ForgetBeyond(0, 800, ledger.pay);
  CHECK(ledger.residents.Has(Part(700)));
  ledger.residents.ForgetBeyond(0, 799, ledger.pay);
  CHECK(ledger.residents.empty());
}

}  // namespace
}  // namespace jaxoffload::testing
