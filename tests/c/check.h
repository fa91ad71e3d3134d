// What the C tests share: claims, and groups of ranks that are processes or threads.
#ifndef SHARDCOMM_TESTS_CHECK_H_
#define SHARDCOMM_TESTS_CHECK_H_

#include <stdint.h>

#include "shardcomm.h"

// Ends the process with the claim, unless it holds.
void require(int holds, const char* claim);
// Ends the process with the call's error, unless it is SHC_OK.
void ok(shc_status status);
// Ends the process, unless the call was refused like this and its sentence has `part` in it.
void refused(shc_status status, shc_status wanted, const char* part);

typedef void (*rank_main)(shc_comm* comm);

// Runs `body` on `size` ranks that are processes; fails if one of them does not end with 0.
void on_processes(int size, rank_main body);
// The same on ranks that are threads of this process.
void on_threads(int size, rank_main body);
// The same, where some may end as they like: `ends[rank]` is each one's exit status, or minus the
// number of the signal that ended it.
void processes_end(int size, rank_main body, int* ends);

int rank_of(const shc_comm* comm);
int size_of(const shc_comm* comm);
// What every rank knows of every other's numbers.
float value_of(int rank, int64_t i);

#endif  // SHARDCOMM_TESTS_CHECK_H_
