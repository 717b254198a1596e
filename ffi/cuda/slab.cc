#include "ffi/cuda/slab.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace symmkv {
namespace {

std::string Hex(const void* data, size_t nbytes) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < nbytes; ++i) {
    const auto byte = static_cast<const unsigned char*>(data)[i];
    text += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return text;
}

static_assert(sizeof(cudaIpcMemHandle_t) == 64);  // as FromText reads it

// A pid names a process within its pid namespace alone, and that within one boot of the host.
std::string ProcessName() {
  char boot_id[64] = {}, pid_namespace[64] = {};
  if (FILE* const file = std::fopen("/proc/sys/kernel/random/boot_id", "r")) {
    if (std::fscanf(file, "%63s", boot_id) != 1) boot_id[0] = '?';
    std::fclose(file);
  }
  if (readlink("/proc/self/ns/pid", pid_namespace, sizeof pid_namespace - 1) < 0) {
    pid_namespace[0] = '?';
  }
  return std::string(boot_id) + "/" + pid_namespace + "/" + std::to_string(getpid());
}

void EnablePeerAccess(int device, int peer) {
  int can = 0;
  Check(cudaDeviceCanAccessPeer(&can, device, peer), "cudaDeviceCanAccessPeer");
  if (can == 0) {
    throw std::runtime_error("GPU " + std::to_string(device) + " can't access the memory of GPU " +
                             std::to_string(peer));
  }
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // XLA, or another heap, has; clears the error
    return;
  }
  Check(error, "cudaDeviceEnablePeerAccess");
}

}  // namespace

void Check(cudaError_t error, const std::string& operation) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call of anybody, XLA's too, would report it
  throw std::runtime_error(operation + ": " + cudaGetErrorString(error));
}

OnDevice::OnDevice(int device) {
  Check(cudaGetDevice(&before_), "cudaGetDevice");
  Check(cudaSetDevice(device), "cudaSetDevice(" + std::to_string(device) + ")");
}

OnDevice::~OnDevice() { cudaSetDevice(before_); }

std::string SlabAddress::ToText() const {
  return process + " " + device_uuid + " " + std::to_string(device) + " " +
         std::to_string(pointer) + " " + Hex(&handle, sizeof handle);
}

SlabAddress SlabAddress::FromText(const std::string& text) {
  SlabAddress address{};
  char process[192] = {}, device_uuid[33] = {}, handle[2 * sizeof address.handle + 1] = {};
  unsigned long long pointer = 0;
  const int found = std::sscanf(text.c_str(), "%191s %32s %d %llu %128s", process, device_uuid,
                                &address.device, &pointer, handle);
  if (found != 5 || std::strlen(handle) != 2 * sizeof address.handle) {
    throw std::runtime_error("not the address of a GPU slab: '" + text + "'");
  }
  address.process = process;
  address.device_uuid = device_uuid;
  address.pointer = pointer;
  for (size_t i = 0; i < sizeof address.handle; ++i) {
    const char digits[] = {handle[2 * i], handle[2 * i + 1], 0};
    reinterpret_cast<unsigned char*>(&address.handle)[i] =
        static_cast<unsigned char>(std::strtoul(digits, nullptr, 16));
  }
  return address;
}

DeviceSlab& DeviceSlab::operator=(DeviceSlab&& other) noexcept {
  if (this != &other) {
    Release();
    device_ = other.device_;
    base_ = std::exchange(other.base_, nullptr);
  }
  return *this;
}

DeviceSlab DeviceSlab::Create(int device, uint64_t nbytes) {
  const OnDevice on(device);
  DeviceSlab slab;
  slab.device_ = device;
  void* base = nullptr;
  Check(cudaMalloc(&base, nbytes), "cannot allocate " + std::to_string(nbytes) + " bytes on GPU " +
                                       std::to_string(device) +
                                       " (XLA preallocates most of it: lower "
                                       "XLA_PYTHON_CLIENT_MEM_FRACTION, max_current_pages or "
                                       "SYMMKV_HEAP_MB)");
  slab.base_ = static_cast<char*>(base);
  Check(cudaMemset(base, 0, nbytes), "cudaMemset of the slab");
  return slab;
}

SlabAddress DeviceSlab::Address() const {
  const OnDevice on(device_);
  SlabAddress address{};
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
  address.process = ProcessName();
  address.device_uuid = Hex(&properties.uuid, sizeof properties.uuid);
  address.device = device_;
  address.pointer = reinterpret_cast<uint64_t>(base_);
  Check(cudaIpcGetMemHandle(&address.handle, base_), "cudaIpcGetMemHandle");
  return address;
}

void DeviceSlab::Release() {
  if (base_ == nullptr) return;
  const OnDevice on(device_);
  cudaFree(std::exchange(base_, nullptr));
}

MappedSlab& MappedSlab::operator=(MappedSlab&& other) noexcept {
  if (this != &other) {
    Release();
    device_ = other.device_;
    base_ = std::exchange(other.base_, nullptr);
    imported_ = other.imported_;
  }
  return *this;
}

MappedSlab MappedSlab::Map(int device, const SlabAddress& address) {
  const OnDevice on(device);
  MappedSlab slab;
  slab.device_ = device;
  slab.imported_ = address.process != ProcessName();
  if (slab.imported_) {
    void* base = nullptr;
    Check(cudaIpcOpenMemHandle(&base, address.handle, cudaIpcMemLazyEnablePeerAccess),
          "cudaIpcOpenMemHandle of GPU " + address.device_uuid);
    slab.base_ = static_cast<char*>(base);
  } else {
    // An IPC handle can't be opened where it was made.
    if (address.device != device) EnablePeerAccess(device, address.device);
    slab.base_ = reinterpret_cast<char*>(address.pointer);
  }
  return slab;
}

void MappedSlab::Release() {
  char* const base = std::exchange(base_, nullptr);
  if (base == nullptr || !imported_) return;
  const OnDevice on(device_);
  cudaIpcCloseMemHandle(base);
}

}  // namespace symmkv
