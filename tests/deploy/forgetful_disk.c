/* A disk that forgets: what it has is what was there at the last sync.

   Loaded before the C library, it stands in for fsync and fdatasync of what lies below $DISK_OF. A
   file that is synced is copied to $DISK_HAS/INODE; of a folder that is synced, the names are
   written to $DISK_HAS/INODE.names, a line "INODE NAME" each. Nothing is synced in earnest.

   The system gives the number of a file that was removed to a new one, while the disk still has the
   old one under it. So what is removed or replaced is linked to $DISK_HAS/INODE.there first, which
   keeps its number from being given again. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;

static void copy_content(const char *from, FILE *to) {
    char piece[1 << 16];
    size_t count;
    FILE *file = fopen(from, "rb");
    if (!file)
        abort();
    while ((count = fread(piece, 1, sizeof piece, file)))
        if (fwrite(piece, 1, count, to) != count)
            abort();
    fclose(file);
}

static void copy_names(const char *from, FILE *to) {
    struct dirent *entry;
    DIR *folder = opendir(from);
    if (!folder)
        abort();
    while ((entry = readdir(folder)))
        if (strcmp(entry->d_name, ".") && strcmp(entry->d_name, ".."))
            fprintf(to, "%llu %s\n", (unsigned long long)entry->d_ino, entry->d_name);
    closedir(folder);
}

static int synced(int descriptor) {
    const char *of = getenv("DISK_OF"), *has = getenv("DISK_HAS");
    char link[64], path[4096], place[4300], beside[4300];
    struct stat about;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0 || !of || !has || fstat(descriptor, &about))
        return 0;
    path[length] = 0;
    if (strncmp(path, of, strlen(of)))
        return 0;
    int folder = S_ISDIR(about.st_mode);
    snprintf(place, sizeof place, "%s/%llu%s", has, (unsigned long long)about.st_ino,
             folder ? ".names" : "");
    snprintf(beside, sizeof beside, "%s/new", has);
    pthread_mutex_lock(&one_at_a_time);
    FILE *to = fopen(beside, "wb");
    if (!to)
        abort();
    if (folder)
        copy_names(path, to);
    else
        copy_content(link, to);
    if (fclose(to) || rename(beside, place))
        abort();
    pthread_mutex_unlock(&one_at_a_time);
    return 0;
}

int fsync(int descriptor) { return synced(descriptor); }
int fdatasync(int descriptor) { return synced(descriptor); }

static void keep(const char *path) {
    const char *of = getenv("DISK_OF"), *has = getenv("DISK_HAS");
    char place[4300];
    struct stat about;
    if (!of || !has || strncmp(path, of, strlen(of)) || lstat(path, &about))
        return;
    snprintf(place, sizeof place, "%s/%llu.there", has, (unsigned long long)about.st_ino);
    (void)!link(path, place);
}

int unlink(const char *path) {
    keep(path);
    return ((int (*)(const char *))dlsym(RTLD_NEXT, "unlink"))(path);
}

int rename(const char *from, const char *to) {
    keep(to);
    return ((int (*)(const char *, const char *))dlsym(RTLD_NEXT, "rename"))(from, to);
}
