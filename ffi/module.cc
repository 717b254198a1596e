// The extension module: contexts for jax_symmkv/heap.py, handlers for jax_symmkv/compat.py.

#include "ffi/binding.h"
#include "ffi/shm/handlers.h"

namespace symmkv {
namespace {

nb::dict Registrations() {
  nb::dict cpu;
  cpu["symmkv_new_ticket"] = Capsule(&NewTicket);
  cpu["symmkv_publish"] = Capsule(&Publish);
  cpu["symmkv_barrier"] = Capsule(&Barrier);
  cpu["symmkv_gather"] = Capsule(&Gather);
  cpu["symmkv_exchange"] = Capsule(&Exchange);
  nb::dict platforms;
  platforms["cpu"] = cpu;
  return platforms;
}

}  // namespace

NB_MODULE(SYMMKV_MODULE, m) {
  m.attr("FFI_VERSION") = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.attr("LAYOUT_VERSION") = kLayoutVersion;
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("MAX_BUFFERS") = kMaxBuffers;
  m.attr("PAGE_GRANULE_NBYTES") = kPageGranuleNbytes;
  m.def("registrations", &Registrations, "Platform -> target name -> handler capsule.");
  m.def("sweep_stale_segments", &Segment::SweepStale,
        "Removes the names of segments whose owners are gone.");

  nb::class_<ShmContext> bound(m, "ShmContext");
  bound.def(
      "__init__",
      [](ShmContext* self, uint32_t rank, uint32_t cp_size, uint64_t num_slots,
         const std::vector<uint64_t>& page_nbytes, uint64_t nonce, uint64_t first_epoch,
         uint64_t timeout_ms, uint64_t spin_us) {
        new (self) ShmContext(MakeGeometry(cp_size, num_slots, page_nbytes), rank, nonce,
                              first_epoch, WaitLimits{timeout_ms, spin_us});
      },
      nb::kw_only(), nb::arg("rank"), nb::arg("cp_size"), nb::arg("num_slots"),
      nb::arg("page_nbytes"), nb::arg("nonce"), nb::arg("first_epoch"), nb::arg("timeout_ms"),
      nb::arg("spin_us"));
  BindContext(bound, &ShmRegistry);
}

}  // namespace symmkv
