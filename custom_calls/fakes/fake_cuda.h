// What the fake plugin asks of the fake driver.

#ifndef JAXOFFLOAD_FAKES_FAKE_CUDA_H_
#define JAXOFFLOAD_FAKES_FAKE_CUDA_H_

#include <cstddef>
#include <functional>

namespace fake_cuda {

// An environment variable's number.
int Setting(const char* name, int otherwise);

// Device memory: an address that the host must not touch, so that doing so ends the process. Null
// when the device is full.
char* Allocate(int device, size_t bytes);
void Free(char* address);
// Where the host may read and write what a device address stands for; other addresses are their
// own.
char* Shadow(const void* address);

// Whether the device could read host memory there.
bool IsPinned(const char* address, size_t bytes);

// Puts work on the stream on which a device computes, and waits for all of it.
void Compute(int device, std::function<void()> work);
void AwaitCompute(int device);

}  // namespace fake_cuda

#endif  // JAXOFFLOAD_FAKES_FAKE_CUDA_H_
