/* Ranks that are processes, which mpirun starts on this machine: numbers, dialogues, faults, refusals; --plan --nodes. */

#define DEMO " -m build/demo.gguf --cpu -t 1 --greedy "

/* The beginning of a command that starts processes; NULL: there is no mpirun, or ./moe was built without MPI. */
static const char *mpirun(void) {
    static char begin[128];
    char *out = NULL;
    if (*begin) return begin;
    const bool has = !run_command(MOE_BIN " --version", &out, NULL) && strstr(sb_cstr(&out), "MPI: ");
    if (has && !run_command("mpirun --version", &out, NULL))
        snprintf(begin, sizeof begin, "mpirun%s",
                 strstr(sb_cstr(&out), "Open MPI") ? " --allow-run-as-root --oversubscribe" : "");
    arrfree(out);
    return *begin ? begin : NULL;
}
#define NEEDS_MPI() \
    if (!mpirun()) SKIP("there is no mpirun, or " MOE_BIN " was built without MPI")

/* Ranks of a fixture: --tp and --pp, and as how many processes. */
struct layout_case {
    const char *fixture;
    int tp, pp, n;
};

/* Logits of processes are the bits of threads, and so is a text, with drafts. Catches a slot that is not exchanged: of
 * partial sums, row sums, latents, streams, blocks, logits, and the residual of stages. */
static void test_processes_bits(void) {
    static const struct layout_case cases[] = {
        {"qwen3moe", 4, 1, 4},    {"deepseek_v3", 2, 1, 2},  {"minimax_m2", 2, 1, 2},     {"qwen3_5_moe", 2, 1, 2},
        {"deepseek_v4", 2, 1, 2}, {"gemma4", 2, 1, 2},       {"inkling2_nvfp4", 2, 1, 2}, {"kimi_k3", 2, 1, 2},
        {"glm_moe_dsa", 1, 2, 2}, {"deepseek_v41", 1, 2, 2}, {"deepseek_v3", 2, 2, 2},    {"qwen3moe", 2, 2, 4}};
    NEEDS_MPI();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct layout_case c = cases[i];
        char cmd[512], *a = NULL, *b = NULL, err[ERR_MAX];
        snprintf(cmd, sizeof cmd,
                 MOE_BIN " -m " FIXTURES
                         "%s.gguf --cpu -t 1 --tp %d --pp %d --ids 3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,"
                         "18,19,20,21 --logits @/",
                 c.fixture, c.tp, c.pp);
        for (int k = 0; k < 2; k++) {
            char full[1024];
            if (k) snprintf(full, sizeof full, "%s -np %d %sb.npy </dev/null", mpirun(), c.n, cmd);
            else snprintf(full, sizeof full, "%sa.npy </dev/null", cmd);
            check_command(IN_DIR(full), 0, "", NULL);
        }
        CHECK(!read_file(IN_DIR("@/a.npy"), &a, err), "%s", err);
        CHECK(!read_file(IN_DIR("@/b.npy"), &b, err), "%s", err);
        CHECK(arrlen(a) > 0 && arrlen(a) == arrlen(b) && !memcmp(a, b, (size_t)arrlen(a)),
              "%s --tp %d --pp %d as %d processes: other logits", c.fixture, c.tp, c.pp, c.n);
        unlink(IN_DIR("@/a.npy"));
        unlink(IN_DIR("@/b.npy"));
        arrfree(a);
        arrfree(b);
    }
}

/* A dialogue with every command that reads or writes the state gives what threads give. Catches a state of another
 * process that is not copied. */
static void test_processes_dialogue(void) {
    static const char lines[] =
        "What is 7 squared?\\n/undo\\nTell me about a cat.\\n/regen\\n/save one\\n/clear\\nHi.\\n"
        "/load! one\\n/ctx 300\\nAnd a dog?\\n/undo\\nWhat is 3 plus 4?\\n";
    char cmd[1024], *want = NULL, *got = NULL;
    NEEDS_MPI();
    for (int k = 0; k < 2; k++) {
        snprintf(cmd, sizeof cmd,
                 "export HOME=$PWD/@; printf '%s' | %s%s " MOE_BIN DEMO "-i -c 500 --kv fp8 --tp 2 --seed 1", lines,
                 k ? mpirun() : "", k ? " -np 2" : "");
        CHECK_INT(run_command(IN_DIR(cmd), k ? &got : &want, NULL), 0, "%s", cmd);
    }
    CHECK(arrlen(want) > 100, "too little was answered");
    CHECK_STR(sb_cstr(&got), sb_cstr(&want), "the dialogue");
    arrfree(want);
    arrfree(got);
}

/* Sends a signal to the process of rank `who` of those that have this mark, or asks for it and its guard with signal 0;
 * whether one is there. */
static bool process_signal(const char *mark, int who, int sig) {
    bool found = false;
    DIR *dir = opendir("/proc");
    for (const struct dirent *e; (e = readdir(dir));) {
        char path[300], *text = NULL, err[ERR_MAX], rank[40], comm[FACT_MAX];
        if (e->d_name[0] < '1' || e->d_name[0] > '9') continue;
        if (sig && !strcmp(fact(comm, "/proc/%.20s/comm", e->d_name), "moe-guard\n")) continue;
        snprintf(path, sizeof path, "/proc/%.20s/environ", e->d_name);
        const bool got = !read_file(path, &text, err);
        for (int k = 0; k < 2 && got; k++) { /* Open MPI, MPICH */
            snprintf(rank, sizeof rank, "%s=%d", k ? "PMI_RANK" : "OMPI_COMM_WORLD_RANK", who);
            bool marked = false, numbered = false;
            for (size_t at = 0; at < arrlenu(text); at += strlen(text + at) + 1) {
                marked |= !strncmp(text + at, "MARK=", 5) && !strcmp(text + at + 5, mark);
                numbered |= !strcmp(text + at, rank);
            }
            if (marked && numbered) found = true, kill(atoi(e->d_name), sig);
        }
        arrfree(text);
    }
    closedir(dir);
    return found;
}

/* A process that is killed or stopped while an answer comes, or while the state of a turn is fetched from it, ends all
 * within ten seconds, with a line; turns that had ended are saved. Catches a process that waits for ever, or stays, and
 * messages that wait for a state. */
static void test_processes_lost(void) {
    static const struct {
        bool answers;
        int who, sig;
        const char *says;
    } cases[] = {{true, 1, SIGKILL, "ignal 9"},
                 {false, 1, SIGKILL, "ignal 9"},
                 {true, 1, SIGSTOP, "(process 1) gives no sign"},
                 {true, 0, SIGSTOP, "(process 0) gives no sign"}};
    NEEDS_MPI();
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char cmd[1024], mark[64], *out = NULL, *said = NULL, *saved = NULL, err[ERR_MAX];
        struct child p;
        snprintf(mark, sizeof mark, "%s.%zu", test_dir(), i);
        snprintf(cmd, sizeof cmd, "export MARK=%s HOME=$PWD/@; exec %s -np 2 " MOE_BIN DEMO "-i --tp 2 -n 100000", mark,
                 mpirun());
        if (!child_start(&p, IN_DIR(cmd))) return;
        child_write(&p, "What is 7 squared?\n", 19);
        child_expect(&p, "tok/s");
        if (cases[i].answers) {
            child_write(&p, "/set temp 1\nTell me a long story about the sea.\n", 48);
            poll(NULL, 0, 300);
        }
        const double from = now_seconds();
        CHECK(process_signal(mark, cases[i].who, cases[i].sig), "process %d is not there", cases[i].who);
        const int code = child_end(&p, &out, &said);
        const double took = now_seconds() - from;
        CHECK(code, "exit code 0");
        /* what a busy machine adds to the ten seconds is not the program's */
        CHECK(took < 60, "process %d, signal %d: the end took %.1f s", cases[i].who, cases[i].sig, took);
        CHECK(strstr(sb_cstr(&said), cases[i].says) || strstr(sb_cstr(&out), cases[i].says), "'%s' lacks '%s'",
              sb_cstr(&said), cases[i].says);
        for (int k = 0; k < 100 && (process_signal(mark, 0, 0) || process_signal(mark, 1, 0)); k++) poll(NULL, 0, 100);
        CHECK(!process_signal(mark, 0, 0) && !process_signal(mark, 1, 0), "a process is left");
        CHECK(!read_file(IN_DIR("@/.moe/last.jsonl"), &saved, err) && strstr(sb_cstr(&saved), "7 squared"),
              "not saved");
        unlink(IN_DIR("@/.moe/last.jsonl"));
        arrfree(out);
        arrfree(said);
        arrfree(saved);
    }
}

/* The guard kills a launcher that outlives a process and a process that outlives a launcher, but neither after an orderly
 * end, nor another program. */
static void test_processes_guard(void) {
    enum end { LEAVES, DIES, STOPS /* and the launcher ends */ };
    static const struct {
        const char *parent;
        enum end end;
        bool killed; /* what is left */
    } cases[] = {{"mpirun.openmpi", DIES, true}, {"orted", DIES, true}, {"hydra_pmi_proxy", STOPS, true},
                 {"mpiexec", LEAVES, false},     {"gdb", DIES, false},  {"gdb", STOPS, false}};
    const int fd = (int)syscall(SYS_pidfd_open, getpid(), 0);
    if (fd < 0) SKIP("this kernel has no pidfd_open");
    close(fd);
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int id[2], status = 0;
        if (!CHECK(!pipe(id), "no pipe")) return;
        const pid_t parent = fork();
        if (!parent) {
            prctl(PR_SET_NAME, cases[i].parent);
            const pid_t process = fork();
            if (!process) {
                launcher_guard(0, 0);
                if (cases[i].end == LEAVES) launcher_release();
                raise(cases[i].end == STOPS ? SIGSTOP : SIGKILL);
            }
            waitpid(process, NULL, WUNTRACED);
            if (cases[i].end == STOPS) _exit(write(id[1], &process, sizeof process) < 0);
            for (;;) pause();
        }
        pid_t left = parent, ended = 0;
        if (cases[i].end == STOPS) {
            CHECK_INT(read(id[0], &left, sizeof left), sizeof left, "the process id");
            waitpid(parent, NULL, 0);
        }
        for (int k = 0; k < (cases[i].killed ? 6000 : 30) && !ended; k++) {
            poll(NULL, 0, 10);
            ended = waitpid(left, &status, WNOHANG);
        }
        CHECK(cases[i].killed == (ended == left), "%s, end %d: lives %d", cases[i].parent, cases[i].end, !ended);
        if (!ended) kill(left, SIGKILL), waitpid(left, &status, 0);
        close(id[0]);
        close(id[1]);
    }
    while (waitpid(-1, NULL, WNOHANG) > 0) continue;
    prctl(PR_SET_CHILD_SUBREAPER, 0);
}

/* What cannot run says so, once, and ends all processes. */
static void test_processes_refusals(void) {
    static const struct {
        const char *args; /* after mpirun */
        const char *says;
    } cases[] = {{"-np 5 " MOE_BIN DEMO "-p x", "mpirun has started 5 processes; at most 4 are supported"},
                 {"-np 3 " MOE_BIN DEMO "--tp 2 -p x", "makes 2 ranks, which 3 processes cannot share"},
                 {"-np 2 " MOE_BIN " -m nothing.gguf --cpu -p x", "nothing.gguf"},
                 {"-np 1 " MOE_BIN DEMO "-p x : -np 1 @/moe" DEMO "-p x", "another build of moe"},
                 {"-np 1 -wdir @/a $PWD/" MOE_BIN " -m m.gguf --cpu -p x : -np 1 -wdir @/b $PWD/" MOE_BIN " -p x",
                  "has the hash"}};
    NEEDS_MPI();
    CHECK_INT(
        run_command(IN_DIR("cp " MOE_BIN " @/moe && echo >>@/moe && mkdir @/a @/b && cp build/demo.gguf @/a/m.gguf && "
                           "cp " FIXTURES "qwen3moe.gguf @/b/m.gguf"),
                    NULL, NULL),
        0, "copies");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char cmd[1024], *out = NULL, *said = NULL;
        snprintf(cmd, sizeof cmd, "%s %s </dev/null", mpirun(), cases[i].args);
        CHECK(run_command(IN_DIR(cmd), &out, &said), "`%s` ended without an error", cmd);
        const char *at = strstr(sb_cstr(&said), cases[i].says);
        CHECK(at && !strstr(at + 1, cases[i].says), "`%s`: '%.600s' has '%s' not once", cmd, said, cases[i].says);
        arrfree(out);
        arrfree(said);
    }
    check_command("OMPI_COMM_WORLD_SIZE=2 " MOE_BIN DEMO "-p x </dev/null", 1, "", "MPI");
}

/* --plan --nodes by hand: two hosts of 273 GB/s with Qwen3-30B-A3B. Every one of the 96 all-reduces takes 40 us and what
 * 2,048 floats need at 10 GB/s. */
static void test_processes_plan(void) {
    double one = 0, two = 0;
    for (int k = 0; k < 2; k++) {
        char cmd[256], *out = NULL;
        snprintf(cmd, sizeof cmd, MOE_BIN " --plan --synth qwen3-30b-a3b -c 4096 --tp 2 %s",
                 k ? "--nodes 2x128@273 --link 10,40" : "--gpus 2x128@273");
        CHECK_INT(run_command(cmd, &out, NULL), 0, "%s", cmd);
        const char *at = strstr(sb_cstr(&out), "at most ");
        if (CHECK(at != NULL, "no roofline in '%s'", out)) *(k ? &two : &one) = atof(at + 8);
        arrfree(out);
    }
    const double more = 96 * (40e-6 + 4.0 * 2048 / 10e9 - 5.5e-6);
    CHECK(fabs(1 / (1 / one + more) - two) < 0.02 * two, "%.1f tok/s on one machine, %.1f on two hosts", one, two);
    check_command(MOE_BIN " --plan --synth qwen3-30b-a3b --nodes 0,1", 2, "", "expected HxGIB");
    check_command(MOE_BIN " --plan --synth qwen3-30b-a3b --nodes 2x128 --gpus 2x96", 2, "", "cannot be combined");
    check_command(MOE_BIN " --plan --synth qwen3-30b-a3b --nodes 2x128 --link fast", 2, "", "expected GBPS,US");
    check_command(MOE_BIN " --plan --synth qwen3-30b-a3b --gpus 2x96 --link 1,1", 2, "", "--link");
    check_command(MOE_BIN " --plan --synth qwen3-30b-a3b --nodes 2x128 --n-cpu-moe 2", 2, "", "--nodes");
}

#undef DEMO
#define TESTS_PROCESSES                                                                       \
    {"processes/bits", test_processes_bits}, {"processes/dialogue", test_processes_dialogue}, \
        {"processes/lost", test_processes_lost}, {"processes/guard", test_processes_guard},   \
        {"processes/refusals", test_processes_refusals}, {"processes/plan", test_processes_plan},
