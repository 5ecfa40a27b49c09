// The parts of the fake driver, and what the fake plugin asks of them.

#ifndef JAXOFFLOAD_FAKES_FAKE_CUDA_H_
#define JAXOFFLOAD_FAKES_FAKE_CUDA_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace fake_cuda {

constexpr int kMaxDevices = 8;

// Codes of the driver's.
enum Code : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kIllegalAddress = 700,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kLaunchFailed = 719,
};

// An environment variable's number.
int Setting(const char* name, int otherwise);
int NumDevices();

// Notes that something was refused which no caller that keeps to the rules would have asked for.
// Returns the code. What an environment variable made fail is not noted.
int Refuse(Code code, const std::string& what);

// Device memory: an address that the host must not touch, so that doing so ends the process. Null
// when the device is full. What is freed can be had again at once, as from XLA's pool: work that
// was put on the compute stream before still goes on there, and bytes that nobody has any more are
// overwritten in that stream's order.
char* Allocate(int device, size_t bytes);
void Free(char* address);
int64_t TakenBytes(int device);
// Where the host may read and write what a device address stands for; other addresses are their
// own.
char* Shadow(const void* address);
// The device of an address, -1: host memory.
int DeviceOf(const void* address);
// Whether a range is within one allocation that has not been freed.
bool IsTaken(const void* address, size_t bytes);

// The process's memory as the device sees it.
int Pin(char* address, size_t bytes, unsigned flags);
int Unpin(char* address);
bool IsPinned(const char* address, size_t bytes);
// Whether it is partly in a pinned range: a copy of it is refused.
bool CrossesPinned(const char* address, size_t bytes);
int64_t PinnedBytes();

// Puts work on the stream on which a device computes; its number there. Under FAKE_CUDA_HOLD it is
// done when somebody waits for it.
uint64_t Compute(int device, std::function<void()> work);
// Waits for work up to a number, or for all of it.
void AwaitCompute(int device, uint64_t number);
void AwaitCompute(int device);

// The error that a device's context is lost with, 0: it works.
int Lost(int device);
void Lose(int device, int code);
// Makes a device's context current on this thread, as XLA leaves it there.
void LeaveCurrent(int device);

}  // namespace fake_cuda

#endif  // JAXOFFLOAD_FAKES_FAKE_CUDA_H_
