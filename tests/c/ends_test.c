// Threads and processes that end: in the middle of a call, or with a last call of the library when
// their own objects have been destroyed.
#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"

static void be_a_group_of_one(shc_transport transport) {
  shc_unique_id id;
  shc_comm* comm = NULL;
  ok(shc_get_unique_id(transport, 1, &id));
  ok(shc_comm_init_rank(&comm, 1, &id, 0, NULL));
  shc_stream* stream = NULL;
  ok(shc_stream_create_thread(&stream));
  ok(shc_barrier(comm, 0, stream));
  shc_stream_destroy(stream);
  shc_comm_destroy(comm);
}

static void* is_cancelled(void* calls_have_returned) {
  pthread_cancel(pthread_self());  // takes effect where the thread next may be cancelled
  be_a_group_of_one(SHC_SHM);
  *(int*)calls_have_returned = 1;
  pthread_testcancel();
  return NULL;
}

static void a_cancelled_thread_ends_after_its_call(void) {
  pthread_t thread;
  int calls_have_returned = 0;
  void* end = NULL;
  require(pthread_create(&thread, NULL, is_cancelled, &calls_have_returned) == 0, "a thread");
  pthread_join(thread, &end);
  require(calls_have_returned && end == PTHREAD_CANCELED, "cancelled between calls");
}

static int last_error_is_of_rank(void) {
  return shc_comm_rank(NULL, NULL) == SHC_INVALID_ARGUMENT &&
         strcmp(shc_last_error_text(), "shc_comm_rank: comm is NULL") == 0;
}

static pthread_key_t key;

static void at_the_end_of_the_thread(void* was_right) {
  *(int*)was_right = last_error_is_of_rank();
}

static void* has_an_error(void* was_right) {
  pthread_setspecific(key, was_right);
  return last_error_is_of_rank() ? was_right : NULL;
}

static void a_thread_that_ends_may_call(void) {
  pthread_t thread;
  int was_right = 0;
  require(pthread_key_create(&key, at_the_end_of_the_thread) == 0, "a key");
  require(pthread_create(&thread, NULL, has_an_error, &was_right) == 0, "a thread");
  pthread_join(thread, NULL);
  require(was_right, "the error of a call in a key's destructor");
}

static void at_the_end_of_the_process(void) {
  be_a_group_of_one(SHC_SHM);
  be_a_group_of_one(SHC_LOCAL);
  for (int i = 0; i < 3; ++i) {
    if (!last_error_is_of_rank()) _exit(1);
  }
  _exit(7);
}

static void a_process_that_ends_may_call(void) {
  const pid_t child = fork();
  if (child == 0) {
    atexit(at_the_end_of_the_process);  // first, so that it runs last
    be_a_group_of_one(SHC_SHM);
    if (!last_error_is_of_rank()) _exit(1);
    exit(0);
  }
  int status = 0;
  require(waitpid(child, &status, 0) == child, "the child can be waited for");
  require(WIFEXITED(status) && WEXITSTATUS(status) == 7, "calls of an atexit function");
}

static int open_files(void) {
  int count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != NULL) ++count;
  closedir(folder);
  return count;
}

static void only_barrier(shc_comm* comm) { ok(shc_barrier(comm, 0, NULL)); }

// As a launcher does, which is no rank of its groups.
static void a_process_that_makes_ids_for_others_keeps_no_old_groups(void) {
  on_processes(2, only_barrier);
  const int before = open_files();
  for (int group = 0; group < 3; ++group) on_processes(2, only_barrier);
  require(open_files() == before, "old groups have gone");
}

static void* names_groups(void* is_over) {
  shc_unique_id id;
  while (!__atomic_load_n((int*)is_over, __ATOMIC_RELAXED)) {
    ok(shc_get_unique_id(SHC_LOCAL, 1, &id));
  }
  return NULL;
}

extern void __asan_init(void) __attribute__((weak));  // there with AddressSanitizer alone

// Also while another thread of the parent's is naming a group.
static void a_forked_child_may_name_a_group(void) {
  // Its allocator, gcc 12's, may be locked for ever in a child whose parent's other thread
  // allocates.
  if (__asan_init != NULL) return;
  int is_over = 0;
  pthread_t thread;
  require(pthread_create(&thread, NULL, names_groups, &is_over) == 0, "a thread");
  for (int i = 0; i < 300; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      shc_unique_id id;
      ok(shc_get_unique_id(SHC_LOCAL, 1, &id));
      _exit(0);
    }
    int status = 0;
    require(waitpid(child, &status, 0) == child && status == 0, "a child names a group, too");
  }
  __atomic_store_n(&is_over, 1, __ATOMIC_RELAXED);
  pthread_join(thread, NULL);
}

int main(void) {
  a_process_that_makes_ids_for_others_keeps_no_old_groups();
  a_process_that_ends_may_call();
  a_forked_child_may_name_a_group();
  a_cancelled_thread_ends_after_its_call();
  a_thread_that_ends_may_call();
  return 0;
}
