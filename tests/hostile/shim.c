/* Simulates a failing disk. When preloaded, it makes calls on files under one path fail.

   fault_set("/path", WHAT, errno): WHAT is 'o' for opening, 'r' for reading, 'w' for writing, 'c'
   for creating, renaming and deleting. For example: fault_set("/data", 'r', EIO).
   fault_set("", 0, 0) ends the fault. A new process takes its fault from HOSTILE_FAULT,
   "WHAT errno /path". */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static char under[PATH_MAX];
static char kind;
static int number;

void fault_set(const char *path, char what, int error) {
  snprintf(under, sizeof under, "%s", path);
  kind = what;
  number = error;
}

__attribute__((constructor)) static void inherit(void) {
  const char *given = getenv("HOSTILE_FAULT");
  int path = 0;
  if (given && sscanf(given, "%c %d %n", &kind, &number, &path) == 2 && path)
    snprintf(under, sizeof under, "%s", given + path);
}

static int is_under(const char *path) {
  size_t n = strlen(under);
  return !strncmp(path, under, n) && (path[n] == '/' || !path[n]);
}

static int place_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, PATH_MAX - 1);
  path[n < 0 ? 0 : n] = 0;
  return n > 0;
}

/* Return whether a call of this kind on a path fails. Relative paths are below the descriptor. */
static int fails_at(int directory, const char *path, char what) {
  char whole[2 * PATH_MAX + 2], base[PATH_MAX];
  if (kind != what || !path) return 0;
  if (path[0] != '/') {
    if (directory == AT_FDCWD ? !getcwd(base, sizeof base) : !place_of(directory, base)) return 0;
    snprintf(whole, sizeof whole, "%s/%s", base, path);
    path = whole;
  }
  if (!is_under(path)) return 0;
  errno = number;
  return 1;
}

static int fails_on(int fd, char what) {
  char path[PATH_MAX];
  if (kind != what || fd < 3 || !place_of(fd, path) || !is_under(path)) return 0;
  errno = number;
  return 1;
}

#define REAL(type, name, ...) \
  static type (*real)(__VA_ARGS__); \
  if (!real) real = dlsym(RTLD_NEXT, name)

static int opening_fails(int directory, const char *path, int flags) {
  return fails_at(directory, path, 'o') || ((flags & (O_CREAT | O_WRONLY | O_RDWR)) && fails_at(directory, path, 'c'));
}

#define OPEN(name) \
  int name(const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    REAL(int, #name, const char *, int, ...); \
    return opening_fails(AT_FDCWD, path, flags) ? -1 : real(path, flags, mode); \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name) \
  int name(int at, const char *path, int flags, ...) { \
    va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
    REAL(int, #name, int, const char *, int, ...); \
    return opening_fails(at, path, flags) ? -1 : real(at, path, flags, mode); \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name) \
  FILE *name(const char *path, const char *mode) { \
    REAL(FILE *, #name, const char *, const char *); \
    int writes = strpbrk(mode, "wa+") != 0; \
    return opening_fails(AT_FDCWD, path, writes ? O_WRONLY : 0) ? 0 : real(path, mode); \
  }
FOPEN(fopen)
FOPEN(fopen64)

DIR *opendir(const char *path) {
  REAL(DIR *, "opendir", const char *);
  return fails_at(AT_FDCWD, path, 'o') ? 0 : real(path);
}

#define ON_FD(type, name, what, parameters, arguments) \
  type name parameters { \
    static type (*real) parameters; \
    if (!real) real = dlsym(RTLD_NEXT, #name); \
    return fails_on(fd, what) ? (type)-1 : real arguments; \
  }
ON_FD(ssize_t, read, 'r', (int fd, void *to, size_t n), (fd, to, n))
ON_FD(ssize_t, pread, 'r', (int fd, void *to, size_t n, off_t at), (fd, to, n, at))
ON_FD(ssize_t, pread64, 'r', (int fd, void *to, size_t n, off64_t at), (fd, to, n, at))
ON_FD(ssize_t, readv, 'r', (int fd, const struct iovec *to, int n), (fd, to, n))
ON_FD(ssize_t, write, 'w', (int fd, const void *from, size_t n), (fd, from, n))
ON_FD(ssize_t, pwrite, 'w', (int fd, const void *from, size_t n, off_t at), (fd, from, n, at))
ON_FD(ssize_t, pwrite64, 'w', (int fd, const void *from, size_t n, off64_t at), (fd, from, n, at))
ON_FD(ssize_t, writev, 'w', (int fd, const struct iovec *from, int n), (fd, from, n))

/* A read error in a mapped page would kill the process, so mmap itself fails instead. */
#define MMAP(name, offset) \
  void *name(void *at, size_t n, int protection, int flags, int fd, offset from) { \
    REAL(void *, #name, void *, size_t, int, int, int, offset); \
    return fd >= 3 && fails_on(fd, 'r') ? MAP_FAILED : real(at, n, protection, flags, fd, from); \
  }
MMAP(mmap, off_t)
MMAP(mmap64, off64_t)

int mkdir(const char *path, mode_t mode) {
  REAL(int, "mkdir", const char *, mode_t);
  return fails_at(AT_FDCWD, path, 'c') ? -1 : real(path, mode);
}
int mkdirat(int at, const char *path, mode_t mode) {
  REAL(int, "mkdirat", int, const char *, mode_t);
  return fails_at(at, path, 'c') ? -1 : real(at, path, mode);
}
int rename(const char *from, const char *to) {
  REAL(int, "rename", const char *, const char *);
  return fails_at(AT_FDCWD, to, 'c') ? -1 : real(from, to);
}
int unlink(const char *path) {
  REAL(int, "unlink", const char *);
  return fails_at(AT_FDCWD, path, 'c') ? -1 : real(path);
}
