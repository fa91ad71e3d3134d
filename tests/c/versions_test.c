// Headers and libraries of other versions: CMake builds this program with today's header and with a
// newer one, whose structs have a field more, and each of them on either library.
#include <string.h>

#include "check.h"

static void every_struct_of_this_header_is_known(shc_comm* comm) {
  float send[2] = {1, 2};
  float recv[2] = {0, 0};
  shc_gather_options gather = SHC_GATHER_OPTIONS_INIT;
  ok(shc_all_gather(comm, send, SHC_F32, recv, SHC_F32, 1, &gather, NULL));
  require(recv[0] == 1 && recv[1] == 1, "gathered");
  shc_reduce_options reduce = SHC_REDUCE_OPTIONS_INIT;
  reduce.scale = 2;
  ok(shc_reduce_scatter(comm, send, SHC_F32, recv, SHC_F32, 1, SHC_SUM, &reduce, NULL));
  require(recv[0] == 4 * (1 + (float)rank_of(comm)), "reduced");
  // A newer library does not write behind the end of the program's struct.
  struct {
    shc_receipt receipt;
    char behind[64];
  } kept = {SHC_RECEIPT_INIT, {0}};
  memset(kept.behind, 7, sizeof(kept.behind));
  ok(shc_comm_receipt(comm, "all_gather", &kept.receipt));
  require(kept.receipt.sequence > 0 && kept.receipt.size == sizeof(kept.receipt), "a receipt");
  for (size_t i = 0; i < sizeof(kept.behind); ++i) require(kept.behind[i] == 7, "nothing more");
}

#ifdef SHC_HAS_LATER_FIELD
static void what_an_older_library_does_not_know_is_refused(shc_comm* comm) {
  if (shc_version() == SHC_VERSION) return;
  float number = 0;
  shc_gather_options options = SHC_GATHER_OPTIONS_INIT;
  options.later = 1;
  refused(shc_all_gather(comm, &number, SHC_F32, &number, SHC_F32, 1, &options, NULL),
          SHC_INVALID_ARGUMENT, "options sets an option that this library does not have");
}
#endif

int main(void) {
  on_threads(2, every_struct_of_this_header_is_known);
#ifdef SHC_HAS_LATER_FIELD
  on_threads(2, what_an_older_library_does_not_know_is_refused);
#endif
  return 0;
}
