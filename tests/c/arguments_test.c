// What is wrong with arguments: a status and a sentence that names the function and the argument.
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "check.h"

static void numbers_have_names(void) {
  require(shc_version() == SHC_VERSION, "the header is of this library");
  require(shc_dtype_size(SHC_BF16) == 2 && shc_dtype_size(SHC_F64) == 8, "sizes");
  require(strcmp(shc_dtype_name(SHC_I32), "i32") == 0, "names");
  require(shc_dtype_size((shc_dtype)99) == 0 && shc_dtype_name((shc_dtype)99) == NULL, "no dtype");
  require(strcmp(shc_status_name(SHC_COMM_ERROR), "communication error") == 0, "a status");
}

static void* first_error(void* unused) {
  require(strcmp(shc_last_error_text(), "") == 0, "a thread begins without an error");
  return unused;
}

static void the_last_error_is_the_threads_own(void) {
  refused(shc_comm_rank(NULL, NULL), SHC_INVALID_ARGUMENT, "shc_comm_rank: comm is NULL");
  pthread_t other;
  require(pthread_create(&other, NULL, first_error, NULL) == 0, "a thread can be made");
  pthread_join(other, NULL);
  shc_error error = SHC_ERROR_INIT;
  ok(shc_last_error(&error));
  require(error.status == SHC_INVALID_ARGUMENT && error.rank == -1, "it is kept here");
  require(strcmp(error.kind, "") == 0 && strcmp(error.operation, "") == 0, "and is no rank's");
  shc_error no_struct;
  memset(&no_struct, 0, sizeof(no_struct));
  require(shc_last_error(NULL) == SHC_INVALID_ARGUMENT, "NULL is refused");
  require(shc_last_error(&no_struct) == SHC_INVALID_ARGUMENT, "so is what lacks its INIT");
  ok(shc_last_error(&error));
  require(strcmp(error.text, "shc_comm_rank: comm is NULL") == 0, "the error is still that one");
}

static void structs_begin_with_init(shc_comm* comm) {
  shc_gather_options options = SHC_GATHER_OPTIONS_INIT;
  float number = 0;
  options.size = 3;
  refused(shc_all_gather(comm, &number, SHC_F32, &number, SHC_F32, 1, &options, NULL),
          SHC_INVALID_ARGUMENT, "options->size is 3; it must be at least");
  options.size = SIZE_MAX;
  refused(shc_all_gather(comm, &number, SHC_F32, &number, SHC_F32, 1, &options, NULL),
          SHC_INVALID_ARGUMENT, "options->size is 18446744073709551615; it must be at least");
  memset(&options, 0, sizeof(options));
  refused(shc_all_gather(comm, &number, SHC_F32, &number, SHC_F32, 1, &options, NULL),
          SHC_INVALID_ARGUMENT, "options->version is 0");
  options = (shc_gather_options)SHC_GATHER_OPTIONS_INIT;
  options.version = 90000;
  refused(shc_all_gather(comm, &number, SHC_F32, &number, SHC_F32, 1, &options, NULL),
          SHC_INVALID_ARGUMENT, "options->version is 90000 (9.0.0), and this library is 0.1.0");
  shc_reduce_options reduce = SHC_REDUCE_OPTIONS_INIT;
  reduce.scale = 0;
  refused(shc_reduce_scatter(comm, &number, SHC_F32, &number, SHC_F32, 1, SHC_SUM, &reduce, NULL),
          SHC_INVALID_ARGUMENT, "options->scale is 0");
}

static void handles_are_what_they_are(shc_comm* comm) {
  shc_stream* stream = NULL;
  ok(shc_stream_create_thread(&stream));
  refused(shc_barrier((shc_comm*)stream, 0, NULL), SHC_INVALID_ARGUMENT,
          "comm is not such a handle");
  refused(shc_barrier(comm, 0, (shc_stream*)comm), SHC_INVALID_ARGUMENT,
          "stream is not such a handle");
  refused(shc_start((shc_collective*)stream, NULL), SHC_INVALID_ARGUMENT,
          "collective is not such a handle");
  refused(shc_start(NULL, NULL), SHC_INVALID_ARGUMENT, "collective is NULL");
  shc_stream_destroy((shc_stream*)comm);  // is left alone
  ok(shc_barrier(comm, 0, NULL));
  shc_stream_destroy(stream);
  shc_stream_destroy(NULL);
  shc_comm_destroy(NULL);
  shc_memory_destroy(NULL);
  shc_collective_destroy(NULL);
  shc_event_destroy(NULL);
}

static void operands_fit(shc_comm* comm) {
  float numbers[8] = {0};
  shc_collective* none = NULL;
  refused(shc_all_gather(comm, NULL, SHC_F32, numbers, SHC_F32, 1, NULL, NULL),
          SHC_INVALID_ARGUMENT, "shc_all_gather: send is null");
  refused(shc_all_gather(comm, numbers, SHC_F32, numbers + 2, SHC_F32, -1, NULL, NULL),
          SHC_INVALID_ARGUMENT, "count is -1");
  refused(shc_all_gather(comm, numbers, SHC_F32, numbers + 1, SHC_F32, 2, NULL, NULL),
          SHC_INVALID_ARGUMENT, "send overlaps recv");
  refused(shc_bind_all_gather(comm, numbers, SHC_I32, numbers + 2, SHC_F32, 1, NULL, &none),
          SHC_INVALID_ARGUMENT, "shc_bind_all_gather: no conversion from i32 to f32");
  refused(shc_bind_all_gather(comm, numbers, (shc_dtype)12, numbers + 2, SHC_F32, 1, NULL, &none),
          SHC_INVALID_ARGUMENT, "send_dtype is 12");
  refused(shc_bind_all_reduce(comm, numbers, SHC_F32, 1, (shc_op)8, 0, &none), SHC_INVALID_ARGUMENT,
          "op is 8");
  refused(shc_bind_broadcast(comm, numbers, SHC_F32, 1, 2, &none), SHC_INVALID_ARGUMENT,
          "root is 2; it must be a rank, 0 to 1");
  refused(shc_bind_barrier(comm, 0, NULL), SHC_INVALID_ARGUMENT, "collective is NULL");
  require(none == NULL, "no handle where there is an error");

  // Numbers of bytes that would overflow.
  refused(
      shc_all_gather(comm, numbers, SHC_F32, numbers + 2, SHC_F32, INT64_C(1) << 62, NULL, NULL),
      SHC_INVALID_ARGUMENT, "the 2 ranks together must have at most 2^60 elements");
  refused(shc_reduce_scatter(comm, numbers, SHC_F32, numbers + 2, SHC_F32, INT64_C(1) << 60,
                             SHC_SUM, NULL, NULL),
          SHC_INVALID_ARGUMENT, "the 2 ranks together must have at most 2^60 elements");
  const int64_t least[] = {INT64_MIN, INT64_MIN / 2 - 1, -1};
  for (int i = 0; i < 3; ++i) {  // a sum of two would overflow
    refused(shc_all_gather(comm, numbers, SHC_F32, numbers + 2, SHC_F32, least[i], NULL, NULL),
            SHC_INVALID_ARGUMENT, "it must be at least 0");
    refused(shc_reduce_scatter(comm, numbers, SHC_F32, numbers + 2, SHC_F32, least[i], SHC_SUM,
                               NULL, NULL),
            SHC_INVALID_ARGUMENT, "it must be at least 0");
  }
  refused(shc_all_reduce(comm, numbers, SHC_F32, INT64_C(1) << 62, SHC_SUM, 0, NULL),
          SHC_INVALID_ARGUMENT, "count is 4611686018427387904; it must be at most 2^60");
  refused(shc_broadcast(comm, numbers, SHC_F32, INT64_C(1) << 61, 0, NULL), SHC_INVALID_ARGUMENT,
          "count is 2305843009213693952; it must be at most 2^60");

  refused(shc_comm_name_tag(comm, 7, "mine"), SHC_INVALID_ARGUMENT,
          "tag is 7; it must be 2^32 to 2^32 + 1023");
  refused(shc_comm_name_tag(comm, (INT64_C(1) << 32) + 1024, "mine"), SHC_INVALID_ARGUMENT,
          "it must be 2^32 to 2^32 + 1023");
  ok(shc_comm_name_tag(comm, (INT64_C(1) << 32) + 1023, "mine"));

  const int64_t counts[2] = {1, 3};
  shc_gather_options options = SHC_GATHER_OPTIONS_INIT;
  options.counts = counts;
  refused(shc_all_gather(comm, numbers, SHC_F32, numbers + 4, SHC_F32, 7, &options, NULL),
          SHC_INVALID_ARGUMENT, "count is 7, and options->counts[");

  shc_memory* memory = NULL;
  void* data = NULL;
  refused(shc_allocate(comm, 4, (shc_use)2, &memory, &data), SHC_INVALID_ARGUMENT, "use is 2");
  refused(shc_allocate(comm, 4, SHC_GATHER, NULL, &data), SHC_INVALID_ARGUMENT, "memory is NULL");
  ok(shc_allocate(comm, 64, SHC_GATHER, &memory, &data));
  refused(shc_all_reduce(comm, data, SHC_F32, 1, SHC_SUM, 0, NULL), SHC_INVALID_ARGUMENT,
          "shc_all_reduce: buffer is in communication memory that all ranks share");
  shc_memory_destroy(memory);
}

// Rank 1 has no elements, and gives an address within what it receives.
static void nothing_overlaps_nothing(shc_comm* comm) {
  float all[8];
  float own[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  const int64_t counts[2] = {8, 0};
  const int rank = rank_of(comm);
  shc_gather_options gather = SHC_GATHER_OPTIONS_INIT;
  gather.counts = counts;
  ok(shc_all_gather(comm, rank == 0 ? own : all + 4, SHC_F32, all, SHC_F32, counts[rank], &gather,
                    NULL));
  require(memcmp(all, own, sizeof(all)) == 0, "it receives what the other has");
  shc_reduce_options reduce = SHC_REDUCE_OPTIONS_INIT;
  reduce.counts = counts;
  float sum[8];
  ok(shc_reduce_scatter(comm, own, SHC_F32, rank == 0 ? sum : own + 4, SHC_F32, counts[rank],
                        SHC_SUM, &reduce, NULL));
  require(rank == 1 || sum[7] == 16, "and sends its part");
}

struct rank_of_id {
  const shc_unique_id* id;
  int rank;
};

static void* names_its_rank_as_device(void* given) {
  const struct rank_of_id* own = given;
  shc_comm_options options = SHC_COMM_OPTIONS_INIT;
  options.device = own->rank;
  shc_comm* comm = NULL;
  ok(shc_comm_init_rank(&comm, 2, own->id, own->rank, &options));
  shc_comm_destroy(comm);
  return NULL;
}

static void the_host_has_no_devices(void) {
  shc_unique_id id;
  ok(shc_get_unique_id(SHC_LOCAL, 2, &id));
  struct rank_of_id ranks[2] = {{&id, 0}, {&id, 1}};
  pthread_t other;
  require(pthread_create(&other, NULL, names_its_rank_as_device, &ranks[1]) == 0, "a thread");
  names_its_rank_as_device(&ranks[0]);
  pthread_join(other, NULL);
}

static void ids_are_checked(void) {
  shc_unique_id id;
  shc_comm* comm = NULL;
  refused(shc_get_unique_id(SHC_SHM, 0, &id), SHC_INVALID_ARGUMENT, "size is 0");
  refused(shc_get_unique_id((shc_transport)9, 2, &id), SHC_INVALID_ARGUMENT, "transport is 9");
  refused(shc_get_unique_id(SHC_SHM, 2, NULL), SHC_INVALID_ARGUMENT, "id is NULL");
  memset(&id, 0, sizeof(id));  // it was not sent to this rank
  refused(shc_comm_init_rank(&comm, 2, &id, 0, NULL), SHC_INVALID_ARGUMENT,
          "id is not what shc_get_unique_id of this version has made; one process calls that, and "
          "sends the bytes to every rank");
  ok(shc_get_unique_id(SHC_SHM, 2, &id));
  refused(shc_comm_init_rank(&comm, 3, &id, 0, NULL), SHC_INVALID_ARGUMENT, "size is 3");
  refused(shc_comm_init_rank(&comm, 2, &id, 2, NULL), SHC_INVALID_ARGUMENT, "rank is 2");
  shc_comm_options options = SHC_COMM_OPTIONS_INIT;
  options.deadline_s = -1;
  refused(shc_comm_init_rank(&comm, 2, &id, 0, &options), SHC_INVALID_ARGUMENT, "deadline_s");
  ok(shc_get_unique_id(SHC_LOCAL, 1, &id));
  ok(shc_comm_init_rank(&comm, 1, &id, 0, NULL));
  shc_comm* again = NULL;
  refused(shc_comm_init_rank(&again, 1, &id, 0, NULL), SHC_INVALID_ARGUMENT, "come once each");
  shc_comm_destroy(comm);
  ok(shc_get_unique_id(SHC_SHM, 1, &id));
  ok(shc_comm_init_rank(&comm, 1, &id, 0, NULL));
  refused(shc_comm_init_rank(&again, 1, &id, 0, NULL), SHC_COMM_ERROR,
          "each group needs an id of its own");
  const int other = socket(AF_UNIX, SOCK_STREAM, 0);  // where the group's memory had its descriptor
  refused(shc_comm_init_rank(&again, 1, &id, 0, NULL), SHC_COMM_ERROR,
          "each group needs an id of its own");
  close(other);
  shc_comm_destroy(comm);
  ok(shc_get_unique_id(SHC_LOCAL_CUDA, 1, &id));
  options = (shc_comm_options)SHC_COMM_OPTIONS_INIT;
  options.device = 4096;  // there is no such device, or no CUDA
  refused(shc_comm_init_rank(&comm, 1, &id, 0, &options), SHC_CUDA_ERROR, "CUDA");
  options.exact_sums = 1;
  refused(shc_comm_init_rank(&comm, 1, &id, 0, &options), SHC_INVALID_ARGUMENT,
          "options->exact_sums is set");
}

static void events_wait_as_long_as_they_are_told(void) {
  shc_stream* stream = NULL;
  shc_event* event = NULL;
  ok(shc_stream_create_thread(&stream));
  ok(shc_stream_record(stream, &event));
  ok(shc_event_wait(event, 60));
  require(shc_event_query(event) == SHC_OK, "it has fired");
  refused(shc_event_wait(event, NAN), SHC_INVALID_ARGUMENT, "timeout_s");
  shc_event_destroy(event);
  shc_stream_destroy(stream);
}

int main(void) {
  numbers_have_names();
  the_last_error_is_the_threads_own();
  ids_are_checked();
  the_host_has_no_devices();
  events_wait_as_long_as_they_are_told();
  on_threads(2, structs_begin_with_init);
  on_threads(2, handles_are_what_they_are);
  on_processes(2, operands_fit);
  on_processes(2, nothing_overlaps_nothing);
  return 0;
}
