// Runs the tests of this folder: see check.h.

#include <cstdlib>
#include <cstring>
#include <iostream>
#include <new>
#include <string>

#include "tests/check.h"
#include "tests/no_memory.h"

namespace jaxoffload::testing {

thread_local bool no_memory = false;

}  // namespace jaxoffload::testing

void* operator new(size_t bytes) {
  void* const found = jaxoffload::testing::no_memory ? nullptr : std::malloc(bytes);
  if (found == nullptr) throw std::bad_alloc();
  return found;
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  return jaxoffload::testing::no_memory ? nullptr : std::malloc(bytes);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

int main(int argc, char** argv) {
  using jaxoffload::testing::Registry;
  if (argc < 2) {
    std::cerr << "name cases, or pass --list" << std::endl;
    return 2;
  }
  if (std::strcmp(argv[1], "--list") == 0) {
    for (const auto& [name, test] : Registry()) {
      const char* const folder_end = std::strrchr(test.file, '/');
      std::cout << (folder_end == nullptr ? test.file : folder_end + 1) << " " << name
                << (test.is_apart ? " apart" : "") << "\n";
    }
    return 0;
  }
  for (int i = 1; i < argc; ++i) {
    const auto found = Registry().find(argv[i]);
    if (found == Registry().end()) {
      std::cerr << "no test is called " << argv[i] << std::endl;
      return 2;
    }
    std::cout << found->first << std::endl;
    found->second.body();
    std::cout << "passed" << std::endl;
  }
  return 0;
}
