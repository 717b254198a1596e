// A rank's slab in GPU memory: allocation, and how the peers map it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

namespace symmkv {

// If it failed, throws std::runtime_error that names the operation; clears CUDA's pending error.
void Check(cudaError_t error, const std::string& operation);

// Makes a device current, and what was current before again.
class OnDevice {
 public:
  explicit OnDevice(int device);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
};

// What a peer needs to map a slab; travels as text.
struct SlabAddress {
  std::string process;        // names the process among all of all hosts
  std::string device_uuid;    // names the GPU, or the MIG slice
  int device;                 // its ordinal in that process
  uint64_t pointer;           // for a peer in the same process
  cudaIpcMemHandle_t handle;  // for one in another

  std::string ToText() const;
  // Throws std::runtime_error.
  static SlabAddress FromText(const std::string& text);
};

// Memory of this process.
class DeviceSlab {
 public:
  DeviceSlab() = default;
  DeviceSlab(DeviceSlab&& other) noexcept { *this = static_cast<DeviceSlab&&>(other); }
  DeviceSlab& operator=(DeviceSlab&& other) noexcept;
  ~DeviceSlab() { Release(); }

  // Zeroed, on the given device. Throws std::runtime_error.
  static DeviceSlab Create(int device, uint64_t nbytes);

  char* base() const { return base_; }
  SlabAddress Address() const;
  // Frees it; no peer may read or write it any more.
  void Release();
  // Keeps it until the process ends, since a peer may still write it.
  void Keep() { base_ = nullptr; }

 private:
  int device_ = 0;
  char* base_ = nullptr;
};

// A peer's slab, mapped for the kernels of one device of this process.
class MappedSlab {
 public:
  MappedSlab() = default;
  MappedSlab(MappedSlab&& other) noexcept { *this = static_cast<MappedSlab&&>(other); }
  MappedSlab& operator=(MappedSlab&& other) noexcept;
  ~MappedSlab() { Release(); }

  // Throws std::runtime_error.
  static MappedSlab Map(int device, const SlabAddress& address);

  char* base() const { return base_; }
  void Release();

 private:
  int device_ = 0;
  char* base_ = nullptr;
  bool imported_ = false;  // and so to be closed
};

}  // namespace symmkv
