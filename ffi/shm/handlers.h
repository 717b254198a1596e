// The XLA FFI handlers of platform cpu, and the contexts that they look up.
#pragma once

#include "ffi/registry.h"
#include "ffi/shm/context.h"
#include "xla/ffi/api/ffi.h"

namespace symmkv {

// Contexts by heap id and jax device id. XLA gives the latter as the device ordinal on CPU.
Registry<ShmContext>& ShmRegistry();

XLA_FFI_DECLARE_HANDLER_SYMBOL(NewTicket);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Publish);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Barrier);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Gather);
XLA_FFI_DECLARE_HANDLER_SYMBOL(Exchange);

}  // namespace symmkv
