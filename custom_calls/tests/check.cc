#include "tests/check.h"

#include <cstdlib>
#include <iostream>

namespace jaxoffload::testing {

void Fail(const char* file, int line, const std::string& what) {
  std::cerr << file << ":" << line << ": " << what << std::endl;
  std::exit(1);
}

void FailCheck(const char* file, int line, const char* what) {
  Fail(file, line, std::string(what) + " failed");
}

void CheckContains(const std::string& text, const std::string& part, const char* what,
                   const char* file, int line) {
  if (text.find(part) == std::string::npos) Fail(file, line, what + (" failed: " + text));
}

}  // namespace jaxoffload::testing
