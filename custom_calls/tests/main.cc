// Runs the tests of this folder: see check.h.

#include <cstring>

#include "tests/check.h"

int main(int argc, char** argv) {
  using jaxoffload::testing::Registry;
  if (argc == 2 && std::strcmp(argv[1], "--list") == 0) {
    for (const auto& [name, body] : Registry()) std::cout << name << "\n";
    return 0;
  }
  for (int i = 1; i < argc; ++i) {
    const auto found = Registry().find(argv[i]);
    if (found == Registry().end()) {
      std::cerr << "no test is called " << argv[i] << std::endl;
      return 1;
    }
    found->second();
  }
  if (argc > 1) return 0;
  for (const auto& [name, body] : Registry()) {
    std::cout << name << std::endl;
    body();
  }
  return 0;
}
