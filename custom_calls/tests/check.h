// A test framework in a page, so that a compiler is all that the tests need.
//
//   TEST(QueueKeepsOrder) { CHECK_EQ(queue.Pop(), 3); }
//
// TEST_APART is for a case that wants a process for itself: it forks, which TSan allows while the
// process has started no threads, or it sets what is read once a process.
//
// `native_tests --list` prints a line a case: its file, its name, "apart" if it is. `native_tests
// NAME...` runs those in one process and prints NAME, then "passed", for each. The first check that
// fails ends it with exit status 1. tests/test_native.py runs them.

#ifndef JAXOFFLOAD_TESTS_CHECK_H_
#define JAXOFFLOAD_TESTS_CHECK_H_

#include <exception>
#include <map>
#include <sstream>
#include <string>

namespace jaxoffload::testing {

struct TestCase {
  void (*body)();
  const char* file;
  bool is_apart;
};

inline std::map<std::string, TestCase>& Registry() {
  static std::map<std::string, TestCase> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, TestCase test) { Registry()[name] = test; }
};

// Out of line, so that a check costs the compiler little: there are over a thousand in each of
// three builds.
[[noreturn]] void Fail(const char* file, int line, const std::string& what);
[[noreturn]] void FailCheck(const char* file, int line, const char* what);
void CheckContains(const std::string& text, const std::string& part, const char* what,
                   const char* file, int line);

template <typename A, typename B>
__attribute__((noinline)) void CheckEqual(const A& a, const B& b, const char* text,
                                          const char* file, int line) {
  if (a == b) return;
  std::ostringstream message;
  message << text << " (" << a << " against " << b << ") failed";
  Fail(file, line, message.str());
}

// Exits at once, also when the check is not on the main thread.
#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      ::jaxoffload::testing::FailCheck(__FILE__, __LINE__, "CHECK(" #condition ")"); \
    }                                                                                \
  } while (false)

#define CHECK_EQ(a, b) \
  ::jaxoffload::testing::CheckEqual(a, b, "CHECK_EQ(" #a ", " #b ")", __FILE__, __LINE__)

#define CHECK_CONTAINS(text, part)                                                         \
  ::jaxoffload::testing::CheckContains(text, part, "CHECK_CONTAINS(" #text ", " #part ")", \
                                       __FILE__, __LINE__)

// The statement must throw an exception whose text has `part` in it.
#define CHECK_THROWS(statement, part)                 \
  do {                                                \
    std::string thrown_text = "(nothing was thrown)"; \
    try {                                             \
      statement;                                      \
    } catch (const std::exception& e) {               \
      thrown_text = e.what();                         \
    }                                                 \
    CHECK_CONTAINS(thrown_text, part);                \
  } while (false)

#define JO_TEST(name, is_apart)                                         \
  static void Test##name();                                             \
  static const ::jaxoffload::testing::Registration registration_##name( \
      #name, {Test##name, __FILE__, is_apart});                         \
  static void Test##name()
#define TEST(name) JO_TEST(name, false)
#define TEST_APART(name) JO_TEST(name, true)

}  // namespace jaxoffload::testing

#endif  // JAXOFFLOAD_TESTS_CHECK_H_
