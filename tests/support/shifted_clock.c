/* The time of day of a WorkAgent, shifted by SHIFTED_CLOCK_S seconds: to be named in LD_PRELOAD.
 *
 * Every other program has the machine's: Ray waits until absolute times of day, which the kernel knows nothing of when
 * they are shifted. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift_s;

__attribute__((constructor)) static void begin(void) {
  char arguments[4096];
  const char* seconds = getenv("SHIFTED_CLOCK_S");
  const char wanted[] = "llm_serving.work_agent";
  int file = open("/proc/self/cmdline", O_RDONLY);
  ssize_t length = file < 0 ? 0 : read(file, arguments, sizeof(arguments));
  if (file >= 0) close(file);
  if (seconds != NULL && length > 0 && memmem(arguments, (size_t)length, wanted, strlen(wanted)) != NULL)
    shift_s = atol(seconds);
}

int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*real)(clockid_t, struct timespec*);
  if (real == NULL) real = (int (*)(clockid_t, struct timespec*))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift_s;
  return failed;
}

int gettimeofday(struct timeval* restrict now, void* restrict zone) {
  (void)zone;
  struct timespec precise;
  int failed = clock_gettime(CLOCK_REALTIME, &precise);
  if (!failed) *now = (struct timeval){precise.tv_sec, precise.tv_nsec / 1000};
  return failed;
}

time_t time(time_t* result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result != NULL) *result = now.tv_sec;
  return now.tv_sec;
}
