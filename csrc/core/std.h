#pragma once
// The few names of the standard library that the core uses. Code compiled on a device at run time
// finds no host headers, only the compiler's own functions.

#if defined(__CUDACC_RTC__)
namespace std {
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using uintptr_t = unsigned long long;
static __device__ __forceinline__ float floor(float x) { return ::floorf(x); }
static __device__ __forceinline__ double floor(double x) { return ::floor(x); }
static __device__ __forceinline__ float sqrt(float x) { return ::sqrtf(x); }
static __device__ __forceinline__ double sqrt(double x) { return ::sqrt(x); }
static __device__ __forceinline__ float fabs(float x) { return ::fabsf(x); }
static __device__ __forceinline__ double fabs(double x) { return ::fabs(x); }
static __device__ __forceinline__ bool isfinite(float x) { return ::isfinite(x); }
static __device__ __forceinline__ bool isfinite(double x) { return ::isfinite(x); }
static __device__ __forceinline__ float nextafter(float x, float y) { return ::nextafterf(x, y); }
static __device__ __forceinline__ double nextafter(double x, double y) { return ::nextafter(x, y); }
}  // namespace std
#else
#include <cmath>
#include <cstddef>
#include <cstdint>
#endif
