// The extension module of the CUDA transport: built where nvcc is found, loadable without a driver.
#include "ffi/binding.h"
#include "ffi/cuda/handlers.h"
#include "ffi/cuda/streams_binding.h"

namespace symmkv {
namespace {

nb::dict Registrations() {
  nb::dict cuda;
  cuda["symmkv_new_ticket"] = Capsule(&NewTicketCuda);
  cuda["symmkv_publish"] = Capsule(&PublishCuda);
  cuda["symmkv_barrier"] = Capsule(&BarrierCuda);
  cuda["symmkv_gather"] = Capsule(&GatherCuda);
  cuda["symmkv_exchange"] = Capsule(&ExchangeCuda);
  nb::dict platforms;
  platforms["CUDA"] = cuda;
  return platforms;
}

int DeviceCount() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  cudaGetLastError();
  return 0;
}

}  // namespace

NB_MODULE(SYMMKV_MODULE, m) {
  m.attr("FFI_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("registrations", &Registrations, "Platform -> target name -> handler capsule.");
  m.def("device_count", &DeviceCount, "GPUs that this process sees; 0 without a driver.");

  nb::class_<CudaContext> bound(m, "CudaContext");
  bound.def(
      "__init__",
      [](CudaContext* self, uint32_t rank, uint32_t cp_size, uint64_t num_slots,
         const std::vector<uint64_t>& page_nbytes, uint64_t nonce, uint64_t first_epoch,
         uint64_t timeout_ms, int device, uint32_t max_blocks) {
        new (self) CudaContext(MakeGeometry(cp_size, num_slots, page_nbytes), rank, nonce,
                               first_epoch, timeout_ms, device, max_blocks);
      },
      nb::kw_only(), nb::arg("rank"), nb::arg("cp_size"), nb::arg("num_slots"),
      nb::arg("page_nbytes"), nb::arg("nonce"), nb::arg("first_epoch"), nb::arg("timeout_ms"),
      nb::arg("device"), nb::arg("max_blocks"));
  BindContext(bound, &CudaRegistry);
  BindStreams(m);
}

}  // namespace symmkv
