// Runs the tests of this folder: see check.h.

#include <cstdlib>
#include <cstring>
#include <new>

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
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

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
