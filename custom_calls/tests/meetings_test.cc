// Where the programs of several devices meet: runs that are in flight together are told apart,
// whoever is not waited for any longer is named, everybody is told of what is not as planned.

#include "launcher/meetings.h"

#include <chrono>
#include <mutex>
#include <thread>

#include "tests/check.h"

namespace jaxoffload::testing {
namespace {

constexpr int64_t kForever = 1 << 30;

// An address that says which device brings what to which run; nobody reads there.
char* Address(int64_t run, int32_t rank, int32_t i) {
  return reinterpret_cast<char*>(static_cast<uintptr_t>(run * 10000 + rank * 100 + i + 1));
}

// What devices were told, in words.
struct Told {
  Meetings::End End(int32_t rank) {
    return [this, rank](const std::string& error) {
      const std::lock_guard<std::mutex> lock(mutex);
      words.push_back(std::to_string(rank) + ": " + error);
    };
  }
  std::vector<std::string> Words() {
    const std::lock_guard<std::mutex> lock(mutex);
    return words;
  }
  std::mutex mutex;
  std::vector<std::string> words;
};

// Two arguments and a result on each device.
std::shared_ptr<Meetings> Make(int32_t devices, int64_t patience_ms) {
  return Meetings::Make(devices, std::vector<int64_t>(2 * devices, 8),
                        std::vector<int64_t>(devices, 4), patience_ms);
}

std::optional<Meetings::Whole> Come(Meetings& meetings, int64_t run, int32_t rank,
                                    Meetings::End end, int64_t bytes = 8) {
  return meetings.Come(run, rank, {{Address(run, rank, 0), bytes}, {Address(run, rank, 1), 8}},
                       {{Address(run, rank, 2), 4}}, std::move(end));
}

void CheckWhole(const Meetings::Whole& whole, int64_t run, int32_t devices) {
  CHECK_EQ(whole.ends.size(), static_cast<size_t>(devices));
  for (int32_t rank = 0; rank < devices; ++rank) {
    CHECK(whole.arguments[rank] == Address(run, rank, 0));
    CHECK(whole.arguments[devices + rank] == Address(run, rank, 1));
    CHECK(whole.results[rank] == Address(run, rank, 2));
  }
}

TEST(RunsInFlightTogetherAreToldApart) {
  Told told;
  const auto meetings = Make(2, kForever);
  CHECK(!Come(*meetings, 7, 0, told.End(0)));
  CHECK(!Come(*meetings, 8, 1, told.End(1)));  // overtakes run 7 on its device
  CHECK_EQ(meetings->num_waiting(), 2);
  const auto second = Come(*meetings, 8, 0, told.End(0));
  CHECK(second.has_value());
  CheckWhole(*second, 8, 2);
  const auto first = Come(*meetings, 7, 1, told.End(1));
  CHECK(first.has_value());
  CheckWhole(*first, 7, 2);
  CHECK_EQ(meetings->num_waiting(), 0);
  CHECK(told.Words().empty());
}

TEST(DevicesOnThreadsComeInAnyOrder) {
  constexpr int32_t kDevices = 4;
  constexpr int64_t kRuns = 200;
  const auto meetings = Make(kDevices, kForever);
  std::atomic<int64_t> whole{0};
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kDevices; ++rank) {
    threads.emplace_back([&, rank] {
      for (int64_t i = 0; i < kRuns; ++i) {
        const int64_t run = i ^ rank;  // each its own order
        const auto found = Come(*meetings, run, rank, [](const std::string&) {});
        if (!found.has_value()) continue;
        CheckWhole(*found, run, kDevices);
        ++whole;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(whole.load(), kRuns);
  CHECK_EQ(meetings->num_waiting(), 0);
}

TEST(WhoDoesNotComeIsNamedAndTheNextRunIsWhole) {
  Told told;
  const auto meetings = Make(3, 100);
  CHECK(!Come(*meetings, 1, 0, told.End(0)));
  CHECK(!Come(*meetings, 1, 1, told.End(1)));
  while (told.Words().size() < 2) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK_EQ(meetings->num_waiting(), 0);
  for (const std::string& words : told.Words()) {
    CHECK_CONTAINS(words, "of 3 devices number 2 did not come to this call within 100 ms");
  }
  CHECK(!Come(*meetings, 1, 2, told.End(2)));  // was only late: is not left to wait
  CHECK_EQ(told.Words().size(), size_t{3});
  CHECK_CONTAINS(told.Words()[2], "2: of 3 devices number 2 did not come");
  for (int32_t rank = 0; rank < 2; ++rank) CHECK(!Come(*meetings, 2, rank, told.End(rank)));
  const auto next = Come(*meetings, 2, 2, told.End(2));
  CHECK(next.has_value());
  CheckWhole(*next, 2, 3);
}

TEST(EverybodyIsToldOfWhatIsNotAsPlanned) {
  Told told;
  const auto meetings = Make(3, kForever);
  CHECK(!Come(*meetings, 1, 0, told.End(0)));
  CHECK(!Come(*meetings, 1, 1, told.End(1), 16));
  CHECK_EQ(told.Words().size(), size_t{2});
  CHECK(!Come(*meetings, 1, 2, told.End(2)));
  CHECK_EQ(told.Words().size(), size_t{3});
  for (const std::string& words : told.Words()) {
    CHECK_CONTAINS(words, "arguments[0] has 16 bytes, the plan has 8");
  }
  CHECK(!Come(*meetings, 2, 3, told.End(3)));
  CHECK_CONTAINS(told.Words().back(), "device 3 of 3");
  CHECK(!Come(*meetings, 3, 0, told.End(0)));
  CHECK(!Come(*meetings, 3, 0, told.End(0)));
  CHECK_CONTAINS(told.Words().back(), "device 0 has come twice");
  CHECK_EQ(told.Words().size(), size_t{6});
}

}  // namespace
}  // namespace jaxoffload::testing
