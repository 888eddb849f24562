/* Fails every allocation of a program once, and from there on: `make oom` builds this file with each program.
 *
 *   build/oom-moe [-v] [WORD]   the cases whose command lines hold WORD; -v: prints every message once
 *
 * Each run is a child that runs the program's main. malloc and its kin stand in front of those of the C library, so
 * that allocations of all libraries count. A run must end with a message and a code above 0, and leave no file behind,
 * or give the same stdout, files and code as without a failure. Run at the top of the tree. */
#define main program_main
#include OOM_SOURCE
#undef main
#include <ftw.h>
#include <sys/mman.h>

#define OOM_DIR "build/oom-" PROGRAM ".files"

enum { OOM_SECONDS = 60 /* a run that takes longer hangs */ };

void *__libc_malloc(size_t n);
void *__libc_calloc(size_t n, size_t size);
void *__libc_realloc(void *p, size_t n);
void *__libc_memalign(size_t align, size_t n);

static struct {
    bool on;      /* allocations are counted */
    bool forever; /* all from number `at` on fail, else that one alone */
    long at;      /* 0: none fails */
    long *calls;  /* allocations so far, which the parent reads */
} oom;

/* Counts an allocation. Whether it fails. */
static bool oom_fails(void) {
    if (!oom.on) return false;
    const long n = __atomic_add_fetch(oom.calls, 1, __ATOMIC_SEQ_CST);
    if (!oom.at || n < oom.at || (n > oom.at && !oom.forever)) return false;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t n) { return oom_fails() ? NULL : __libc_malloc(n); }

void *calloc(size_t n, size_t size) { return oom_fails() ? NULL : __libc_calloc(n, size); }

void *realloc(void *p, size_t n) { return oom_fails() ? NULL : __libc_realloc(p, n); }

int posix_memalign(void **p, size_t align, size_t n) {
    void *q = oom_fails() ? NULL : __libc_memalign(align, n);
    if (!q) return ENOMEM;
    *p = q;
    return 0;
}

/* ---- cases ---- */

#define OOM_SAVED OOM_DIR "/home/.moe/last.jsonl" /* a conversation and its state */

/* Command lines of all programs: those of `program` are run. @ stands for the directory of outputs, which is HOME. */
static const struct oom_case {
    const char *program, *args, *input; /* input: stdin */
} cases[] = {
    {"moe", "--tokenize -m build/demo.gguf --special", "Gr\303\274\303\237e e\314\201 <|im_start|> 1234\n"},
    {"moe", "--render -m build/demo.gguf",
     "{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}, {\"role\": \"assistant\", \"content\": "
     "\"<think>b</think>c\"}],"
     " \"tools\": [{\"a\": [1, 2.5, null, true]}], \"add_generation_prompt\": true}"},
    {"moe", "--info -m build/demo.gguf", ""},
    {"moe", "--info -m tests/corpus/gguf/no-output_norm.gguf", ""},
    {"moe", "-m build/demo.gguf --greedy -n 2 -c 128 -t 1 -p hi", ""},
    {"moe", "-m build/demo.gguf --greedy -n 2 -c 128 -t 1 --lines --think off", "hi\nyou\n"},
    {"moe", "-m build/demo.gguf --greedy -c 128 -t 1 --jsonl",
     "{\"id\": [1], \"messages\": [{\"role\": \"user\", \"content\": \"hi\"}], \"max_tokens\": 2, \"stop\": "
     "[\"x\"]}\n"},
    {"moe", "-m build/demo.gguf --greedy -n 2 -c 128 -t 1 -p you --load " OOM_SAVED, ""},
    {"moe", "-m tests/corpus/gguf/valid-qwen3moe.gguf --raw -p abab -n 3 -c 16 -t 1 --greedy", ""},
    {"moe", "-m tests/corpus/gguf/valid-deepseek2.gguf --ids 1,2 --logits @/out -c 16 -t 1", ""},
    {"moe", "-m tests/corpus/gguf/valid-controls.gguf --calibrate LICENSE -o @/out -c 16 -t 1", ""},
    {"moe", "--plan -m build/demo.gguf --gpus 4x96 --json", ""},
    {"moe-convert", "tests/fixtures/deepseek_v3_nvfp4 -o @/out", ""},
    {"moe-convert", "tests/fixtures/qwen3_5_moe -o @/out --quantize nvfp4", ""},
    {"moe-reap", "build/demo.gguf -o @/out --keep 8 --criterion random", ""},
    {"moe-reap", "build/demo.gguf -o @/out --counts @/../in --criterion random", "1 8\n2 4\n3 8\n4 8\n5 8\n"},
    {"moe-reap", "tests/fixtures/qwen3moe_nvfp4 -o @/out --keep 5 --criterion random", ""},
};

/* ---- runs ---- */

static FILE *results; /* of this program; stdout is left as the programs expect it */

/* What a run ended with. */
struct oom_result {
    int code;            /* exit code, or 128 + signal */
    uint64_t out, files; /* hashes of stdout and of all that it left in the directory of outputs */
    char said[4096];     /* stderr */
};

static uint64_t tree_hash;
static bool tree_removed; /* tree_entry removes what it sees */

/* nftw: adds an entry of the directory of outputs to tree_hash, or removes it. */
static int tree_entry(const char *path, const struct stat *st, int kind, struct FTW *at) {
    char *text = NULL, err[ERR_MAX];
    if (!at->level) return 0;
    if (tree_removed) return remove(path);
    if (kind == FTW_D && !strcmp(path + at->base, ".moe")) return 0; /* once made, it stays */
    tree_hash = hash_bytes(tree_hash, path, strlen(path));
    if (kind == FTW_F && !read_file(path, &text, err)) tree_hash = hash_bytes(tree_hash, text, arrlenu(text));
    if (kind == FTW_F) tree_hash = hash_value(tree_hash, st->st_mode);
    arrfree(text);
    return 0;
}

/* Hashes all files below the directory of outputs; removes: removes them. */
static uint64_t tree_walk(bool removes) {
    tree_hash = HASH_START;
    tree_removed = removes;
    nftw(OOM_DIR "/tree", tree_entry, 16, FTW_PHYS | (removes ? FTW_DEPTH : 0));
    return tree_hash;
}

/* Runs the case in this process, whose standard streams are files. */
static void case_child(const struct oom_case *c) {
    char *args[64], *line = NULL;
    int n = 0;
    for (const char *s = c->args; *s; s++) {
        if (*s == '@') sb_puts(&line, OOM_DIR "/tree");
        else arrput(line, *s);
    }
    args[n++] = (char *)(uintptr_t)c->program;
    for (char *s = strtok((char *)(uintptr_t)sb_cstr(&line), " "); s; s = strtok(NULL, " ")) args[n++] = s;
    args[n] = NULL;
    for (int i = 0; i < 3; i++) {
        static const char *const names[] = {OOM_DIR "/in", OOM_DIR "/stdout", OOM_DIR "/stderr"};
        const int fd = open(names[i], i ? O_WRONLY | O_CREAT | O_TRUNC : O_RDONLY, 0600);
        dup2(fd, i);
        close(fd);
    }
    alarm(OOM_SECONDS);
    oom.on = true;
    exit(program_main(n, args));
}

static struct oom_result case_run(const struct oom_case *c, long at, bool forever) {
    struct oom_result r = {0};
    char *text = NULL, err[ERR_MAX];
    int status;
    tree_walk(true);
    oom.at = at;
    oom.forever = forever;
    *oom.calls = 0;
    const pid_t pid = fork();
    if (!pid) case_child(c);
    if (pid < 0 || waitpid(pid, &status, 0) != pid) die("cannot run a child: %s", strerror(errno));
    r.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (read_file(OOM_DIR "/stdout", &text, err)) die("%s", err);
    r.out = hash_bytes(HASH_START, text, arrlenu(text));
    arrsetlen(text, 0);
    if (read_file(OOM_DIR "/stderr", &text, err)) die("%s", err);
    snprintf(r.said, sizeof r.said, "%s", sb_cstr(&text));
    r.files = tree_walk(false);
    arrfree(text);
    return r;
}

/* What is wrong with a run; NULL: nothing. empty: the hash of no files. */
static const char *case_judge(const struct oom_case *c, const struct oom_result *r, const struct oom_result *whole,
                              uint64_t empty) {
    if (r->code >= 128) return "it ended by a signal";
    if (r->code == whole->code && r->out == whole->out && r->files == whole->files) return NULL;
    if (!r->code || r->code == whole->code) return "its results differ, and it does not say so";
    if (!*r->said) return "it failed without a message";
    const bool steps = strstr(c->args, "--calibrate"); /* the file is whole after each step, and stays */
    return steps || r->files == empty ? NULL : "it failed and left a file";
}

/* Prints the last line of a run's messages, once. */
static void said_once(char *said) {
    static char **seen;
    size_t n = strlen(said);
    if (n && said[n - 1] == '\n') said[n - 1] = 0;
    const char *last = strrchr(said, '\n');
    last = last ? last + 1 : said;
    for (size_t i = 0; i < arrlenu(seen); i++)
        if (!strcmp(seen[i], last)) return;
    arrput(seen, xstrdup(last));
    fprintf(results, "    %s\n", last);
}

/* Runs a case once for every allocation and both kinds of failures. The number of runs that are wrong. */
static int case_all(const struct oom_case *c, bool verbose) {
    int wrong = 0, refused = 0, runs = 0;
    FILE *in = fopen(OOM_DIR "/in", "w");
    if (!in || fputs(c->input, in) < 0 || fclose(in)) die("cannot write " OOM_DIR "/in: %s", strerror(errno));
    tree_walk(true);
    const uint64_t empty = tree_walk(false);
    const struct oom_result whole = case_run(c, 0, false);
    const long calls = *oom.calls;
    for (int forever = 0; forever < 2; forever++)
        for (long at = 1; at <= calls; at++, runs++) {
            struct oom_result r = case_run(c, at, forever);
            const char *why = case_judge(c, &r, &whole, empty);
            refused += r.code != whole.code;
            wrong += why != NULL;
            if (why)
                fprintf(results, "  allocation %ld%s: %s (code %d, without a failure %d): %s\n", at,
                        forever ? " and all later" : "", why, r.code, whole.code, r.said);
            else if (verbose && r.code) said_once(r.said);
        }
    fprintf(results, "%s %s %s: %ld allocations, %d runs, %d refused\n", wrong ? "FAIL" : "ok  ", c->program, c->args,
            calls, runs, refused);
    return wrong;
}

/* Makes OOM_SAVED. */
static void save_conversation(void) {
    static const struct oom_case save = {
        "moe", "-m build/demo.gguf --greedy -n 2 -c 128 -t 1 -p hi --load tests/corpus/session/valid.jsonl", ""};
    mkdir(OOM_DIR "/home", 0777);
    setenv("HOME", OOM_DIR "/home", 1);
    const struct oom_result r = case_run(&save, 0, false);
    if (r.code) die("no conversation is saved: %s", r.said);
}

int main(int argc, char **argv) {
    const bool verbose = argc > 1 && !strcmp(argv[1], "-v");
    const char *word = argc > 1 + verbose ? argv[1 + verbose] : "";
    int wrong = 0;
    results = fdopen(dup(1), "w");
    if (!results) die("cannot print: %s", strerror(errno));
    setvbuf(results, NULL, _IONBF, 0); /* a child must not print it again */
    mkdir(OOM_DIR, 0777);
    mkdir(OOM_DIR "/tree", 0777);
    oom.calls = mmap(NULL, sizeof *oom.calls, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (oom.calls == MAP_FAILED) die("cannot map memory: %s", strerror(errno));
    if (!strcmp(PROGRAM, "moe")) save_conversation();
    setenv("HOME", OOM_DIR "/tree", 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        if (!strcmp(cases[i].program, PROGRAM) && strstr(cases[i].args, word)) wrong += case_all(&cases[i], verbose);
    if (wrong) fprintf(results, "%d runs are wrong\n", wrong);
    return wrong != 0;
}
