// The custom calls of platform CUDA; the same names and operands as ffi/shm/handlers.h's.
#pragma once

#include "ffi/cuda/context.h"
#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"

namespace symmkv {

Registry<CudaContext>& CudaRegistry();

XLA_FFI_DECLARE_HANDLER_SYMBOL(NewTicketCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(PublishCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(BarrierCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(GatherCuda);
XLA_FFI_DECLARE_HANDLER_SYMBOL(ExchangeCuda);

}  // namespace symmkv
