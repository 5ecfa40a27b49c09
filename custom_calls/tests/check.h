// A test framework in a page, so that a compiler is all that the tests need.
//
//   TEST(QueueKeepsOrder) { CHECK_EQ(queue.Pop(), 3); }
//
// `native_tests --list` prints the names; `native_tests NAME...` runs those, or all. The exit
// status is 1 if a check failed. tests/test_native.py makes one pytest case of each.

#ifndef JAXOFFLOAD_TESTS_CHECK_H_
#define JAXOFFLOAD_TESTS_CHECK_H_

#include <cstdlib>
#include <exception>
#include <iostream>
#include <map>
#include <sstream>
#include <string>

namespace jaxoffload::testing {

using TestBody = void (*)();

inline std::map<std::string, TestBody>& Registry() {
  static std::map<std::string, TestBody> tests;
  return tests;
}

struct Registration {
  Registration(const char* name, TestBody body) { Registry()[name] = body; }
};

[[noreturn]] inline void Fail(const char* file, int line, const std::string& what) {
  std::cerr << file << ":" << line << ": " << what << " failed" << std::endl;
  std::exit(1);
}

template <typename A, typename B>
void CheckEqual(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return;
  std::ostringstream message;
  message << text << " (" << a << " against " << b << ")";
  Fail(file, line, message.str());
}

// Exits at once, also when the check is not on the main thread.
#define CHECK(condition)                                                                        \
  do {                                                                                          \
    if (!(condition)) ::jaxoffload::testing::Fail(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (false)

#define CHECK_EQ(a, b) \
  ::jaxoffload::testing::CheckEqual(a, b, "CHECK_EQ(" #a ", " #b ")", __FILE__, __LINE__)

#define CHECK_CONTAINS(text, part)                                                        \
  do {                                                                                    \
    const std::string found_text = (text);                                                \
    if (found_text.find(part) == std::string::npos) {                                     \
      ::jaxoffload::testing::Fail(__FILE__, __LINE__,                                     \
                                  "CHECK_CONTAINS(" #text ", " #part "): " + found_text); \
    }                                                                                     \
  } while (false)

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

#define TEST(name)                                                                         \
  static void Test##name();                                                                \
  static const ::jaxoffload::testing::Registration registration_##name(#name, Test##name); \
  static void Test##name()

}  // namespace jaxoffload::testing

#endif  // JAXOFFLOAD_TESTS_CHECK_H_
