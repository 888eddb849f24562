/* --doctor: what it makes of a machine that the tests synthesize, and of this one. */

/* A file below the synthetic machine's root. */
__attribute__((format(printf, 2, 3))) static void machine_put(const char *path, const char *fmt, ...) {
    char full[512], cmd[600];
    va_list ap;
    snprintf(full, sizeof full, "%s%s", fact_root, path);
    snprintf(cmd, sizeof cmd, "mkdir -p \"$(dirname '%s')\"", full);
    FILE *f = system(cmd) ? NULL : fopen(full, "w");
    if (!CHECK(f, "cannot write %s", full)) return;
    va_start(ap, fmt);
    vfprintf(f, fmt, ap);
    va_end(ap);
    fclose(f);
}

static void machine_begin(void) {
    static char root[256];
    snprintf(root, sizeof root, "%s/machine", test_dir());
    fact_root = root;
    machine_put("/proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n");
    machine_put("/proc/loadavg", "0.00 0.00 0.00 1/1 1\n");
}

static void machine_end(void) {
    char cmd[512];
    snprintf(cmd, sizeof cmd, "rm -rf %s", fact_root);
    CHECK(!system(cmd), "%s failed", cmd);
    fact_root = "";
}

/* A GPU at 0000:BUS:00.0: link `width` of 16 lanes, generation 4 or another. */
static void machine_gpu(int bus, int width, const char *speed, size_t bar) {
    char path[128];
    const struct {
        const char *name, *text;
    } f[] = {{"vendor", "0x10de\n"},
             {"class", "0x030200\n"},
             {"max_link_width", "16\n"},
             {"max_link_speed", "16.0 GT/s PCIe\n"},
             {"current_link_speed", speed},
             {"numa_node", "1\n"},
             {"resource1", ""}};
    for (size_t i = 0; i < sizeof f / sizeof *f; i++) {
        snprintf(path, sizeof path, "/sys/bus/pci/devices/0000:%02x:00.0/%s", bus, f[i].name);
        machine_put(path, "%s", f[i].text);
    }
    snprintf(path, sizeof path, "/sys/bus/pci/devices/0000:%02x:00.0/current_link_width", bus);
    machine_put(path, "%d\n", width);
    char full[512];
    snprintf(full, sizeof full, "%s/sys/bus/pci/devices/0000:%02x:00.0/resource1", fact_root, bus);
    CHECK(!truncate(full, (off_t)bar), "%s: %s", full, strerror(errno));
}

/* The finding whose text holds `what`; NULL: there is none. */
static const struct finding *doctor_said(const struct doctor *d, const char *what) {
    for (int i = 0; i < d->n; i++)
        if (strstr(d->found[i].what, what)) return &d->found[i];
    return NULL;
}

/* There is such a finding, of this level, and its advice holds `advice` (NULL: it has none). */
static void check_finding(const struct doctor *d, enum severity severity, const char *what, const char *advice) {
    const struct finding *f = doctor_said(d, what);
    if (!CHECK(f, "nothing says '%s'", what)) return;
    CHECK(f->severity == severity, "'%s' is %s, expected %s", f->what, severity_names[f->severity],
          severity_names[severity]);
    CHECK(advice ? f->advice && strstr(f->advice, advice) : !f->advice, "'%s' advises '%s', expected '%s'", f->what,
          f->advice, advice);
}

/* Every finding but those that are ok advises something. */
static void check_advice(const struct doctor *d) {
    for (int i = 0; i < d->n; i++)
        CHECK((d->found[i].severity == SEVERITY_OK) == !d->found[i].advice, "%s '%s' advises '%s'",
              severity_names[d->found[i].severity], d->found[i].what, d->found[i].advice);
}

/* A doctor that prints nothing before its end. */
static struct doctor *doctor_new(struct settings *set) {
    struct doctor *d = xcalloc(1, sizeof *d);
    settings_init(set);
    set->json = true, d->set = set;
    return d;
}

static void doctor_done(struct doctor *d) {
    settings_free(d->set);
    free(d);
}

/* All of a doctor's work, without its words. The exit code. */
static int doctor_silent(struct doctor *d) {
    struct caught c;
    catch_begin(&c);
    const int code = doctor_run(d);
    catch_end(&c, NULL, NULL);
    return code;
}

/* A machine on which everything is wrong that files can tell. */
static void test_doctor_machine(void) {
    struct settings set;
    struct doctor *d = doctor_new(&set);
    machine_begin();
    machine_gpu(1, 8, "16.0 GT/s PCIe\n", (size_t)256 << 20);
    machine_gpu(2, 16, "2.5 GT/s PCIe\n", (size_t)32 << 30);
    machine_gpu(3, 255, "Unknown\n", 0);
    machine_put("/sys/bus/pci/devices/0000:04:00.0/vendor", "0x1002\n"); /* another maker's */
    machine_put("/sys/bus/pci/devices/0000:04:00.0/class", "0x030000\n");
    machine_put("/sys/bus/pci/devices/0000:05:00.0/vendor", "0x10de\n"); /* its sound */
    machine_put("/sys/bus/pci/devices/0000:05:00.0/class", "0x040300\n");
    machine_put("/sys/bus/pci/devices/$evil/vendor", "0x10de\n");
    machine_put("/sys/bus/pci/devices/$evil/class", "0x030000\n");
    machine_put("/sys/class/iommu/dmar0/x", "\n");
    machine_put("/sys/module/nouveau/x", "\n");
    machine_put("/proc/sys/kernel/osrelease", "5.15.0-microsoft-standard-WSL2\n");
    machine_put("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n");
    machine_put("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n");
    machine_put("/proc/loadavg", "999.5 1 1 1/1 1\n");
    machine_put("/proc/meminfo", "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\nSwapTotal: 8388608 kB\nSwapFree: "
                                 "6291456 kB\n");
    machine_put("/proc/self/cgroup", "1:cpu:/y\n0::/a/b\n");
    machine_put("/sys/fs/cgroup/a/b/memory.max", "4294967296\n");
    doctor_bus(d);
    CHECK(d->n_bus == 3, "%d GPUs are on the bus", d->n_bus);
    doctor_build(d);
    for (int i = 1; i < 4; i++) {
        char who[32], bus[24];
        snprintf(who, sizeof who, "card %d", i);
        snprintf(bus, sizeof bus, "0000:%02x:00.0", i);
        double rate = doctor_link(d, who, bus, (size_t)16 << 30);
        CHECK(i == 3 ? rate == 0 : rate > 3.9e9 && rate < 16e9, "%s: %g bytes per second", who, rate);
    }
    doctor_host(d);
    check_finding(d, SEVERITY_WARNING, "card 1: PCIe 4.0 x8 of at most 4.0 x16, 15.8 GB/s, NUMA node 1, BAR 0.25 GiB",
                  "bifurcation");
    check_finding(d, SEVERITY_NOTE, "card 1: only 0.25 GiB", "Resizable BAR");
    check_finding(d, SEVERITY_NOTE, "card 2: PCIe 1.0 x16 of at most 4.0 x16, 4.0 GB/s", "firmware");
    CHECK(!doctor_said(d, "card 2: only") && !doctor_said(d, "card 3"), "too much is said of the links");
    check_finding(d, SEVERITY_NOTE, "the IOMMU is active", "iommu=pt");
    check_finding(d, SEVERITY_WARNING, "nouveau", "blacklist");
    check_finding(d, SEVERITY_NOTE, "WSL2", ".wslconfig");
    check_finding(d, SEVERITY_NOTE, "powersave", "performance");
    check_finding(d, SEVERITY_NOTE, "huge pages are off", "madvise");
    check_finding(d, SEVERITY_NOTE, "load average is 999.5", "stop");
    check_finding(d, SEVERITY_NOTE, "2.0 GiB are swapped out", "stop programs");
    check_finding(d, SEVERITY_NOTE, "limits memory to 4.0 GiB", "--memory");
    check_finding(d, SEVERITY_OK, "16.0 of 32.0 GiB", NULL);
#ifndef MOE_CUDA
    check_finding(d, SEVERITY_WARNING, "built without CUDA: it uses the CPU", "CUDA toolkit");
    check_finding(d, SEVERITY_WARNING, "0000:01:00.0: PCIe 4.0 x8", "slot");
#endif
    check_advice(d);
    machine_end();
    doctor_done(d);
}

/* A machine about which there is nothing to say, and text that is not what it should be. */
static void test_doctor_quiet(void) {
    struct settings set;
    struct doctor *d = doctor_new(&set);
    machine_begin();
    doctor_bus(d), doctor_build(d), doctor_host(d);
    for (int i = 0; i < d->n; i++) CHECK(d->found[i].severity == SEVERITY_OK, "%s", d->found[i].what);
#ifndef MOE_CUDA
    check_finding(d, SEVERITY_OK, "no GPU here", NULL);
    CHECK(d->n == 3, "%d findings", d->n);
#endif
    machine_put("/proc/meminfo", "MemTotal:\xff\x1b[2J");
    machine_put("/proc/self/cgroup", "0::/%%n%%s/../%01000d\n", 1);
    machine_put("/proc/loadavg", "1e999\x1b");
    doctor_host(d);
    for (int i = 0; i < DOCTOR_FINDINGS + 8; i++)
        doctor_find(d, SEVERITY_NOTE, "x", "a\x1b\xc3\xa4%0*d", ERR_MAX + 88, i);
    CHECK(d->n == DOCTOR_FINDINGS && strlen(d->found[d->n - 1].what) == ERR_MAX - 1, "%d findings", d->n);
    for (int i = 0; i < d->n; i++)
        for (const char *c = d->found[i].what; *c; c++) CHECK(*c >= 32 && *c < 127, "byte %d", *c);
    CHECK(!strncmp(d->found[d->n - 1].what, "a???0", 5), "%.8s", d->found[d->n - 1].what);
    for (size_t i = 0; i < sizeof doctor_checks / sizeof *doctor_checks; i++) {
        const struct check *c = &doctor_checks[i];
        const char *value = strchr(c->what, '%');
        CHECK((c->severity == SEVERITY_OK) == !c->advice, "'%s' advises '%s'", c->what, c->advice);
        CHECK(!value || (value[1] == 's' && !strchr(value + 1, '%')), "'%s' is no text of a check", c->what);
    }
    CHECK(slow_files(0x6969) && slow_files((uint64_t)(int32_t)0xff534d42) && !slow_files(0xef53), "file systems");
    machine_end();
    doctor_done(d);
}

/* A model without a vocabulary, in process: what is not checked is said. */
static void test_doctor_mute(void) {
    struct settings set;
    struct model m = {0};
    char path[256];
    struct doctor *d = doctor_new(&set);
    struct synth y = synth_parse("qwen3-30b-a3b:layers=2,experts=8,embedding_length=256,attention.head_count=4,"
                                 "attention.head_count_kv=2,expert_feed_forward_length=128,vocab_size=512");
    snprintf(path, sizeof path, "%s/mute.gguf", test_dir());
    synth_make(&m, &y, path, false);
    model_free(&m);
    set.model = xstrdup(path), set.cpu = true, set.tp = 2, set.n_ctx = 64;
    CHECK(doctor_silent(d) == EXIT_OK, "exit code");
    check_finding(d, SEVERITY_OK, "A: a forward pass in", NULL);
    check_finding(d, SEVERITY_NOTE, "the model has no vocabulary", "moe-convert");
    check_finding(d, SEVERITY_OK, "an all-reduce over 2 ranks on the CPU: 8 KB", NULL);
    CHECK(!d->open[STEP_CONTEXT] && d->open[STEP_SPEED] && doctor_said(d, "decode "), "the steps are others");
    check_advice(d);
    doctor_done(d);
}

/* The report as JSON: its last step, its worst level and the exit code agree. */
static json_t *doctor_json(const char *args, int code) {
    char cmd[512], *out = NULL, *said = NULL;
    json_error_t je;
    snprintf(cmd, sizeof cmd, MOE_BIN " --doctor --json %s </dev/null", args);
    int rc = run_command(cmd, &out, &said);
    json_t *all = json_loadb(arrlen(out) ? out : "", arrlenu(out), 0, &je), *list = json_object_get(all, "findings"),
           *f;
    size_t i;
    bool bad = false;
    CHECK(all, "%s: %s in '%.200s'", args, je.text, sb_cstr(&out));
    CHECK(rc == code && json_integer_value(json_object_get(all, "exit")) == code, "%s: exit code %d, expected %d: %s",
          args, rc, code, sb_cstr(&said));
    json_array_foreach(list, i, f) {
        const char *step = json_string_value(json_object_get(f, "step")),
                   *level = json_string_value(json_object_get(f, "level")),
                   *what = json_string_value(json_object_get(f, "what")),
                   *advice = json_string_value(json_object_get(f, "advice"));
        if (!CHECK(step && level && what && advice && *what, "%s: finding %zu lacks something", args, i)) continue;
        bad |= !strcmp(level, "error");
        CHECK(!strcmp(level, "ok") == !*advice, "%s: '%s' advises '%s'", args, what, advice);
    }
    CHECK(json_array_size(list) >= 3 && bad == (code != 0), "%s: %zu findings", args, json_array_size(list));
    arrfree(out), arrfree(said);
    return all;
}

static void test_doctor_cli(void) {
    static const char *const titles[] = {"Starts?\n", "\nForward completes?\n", "\nOutput coherent?\n",
                                         "\nLong context coherent?\n", "\nFast enough?\n"};
    static const char *const want[] = {"ok       A: an answer", "ok       B: 7 squared is 49",
                                       "ok       C: a fact in 1000 tokens is found", "decode ", "0 errors, "};
    char *out = NULL, *said = NULL;
    int rc = run_command(MOE "--doctor --cpu -t 2 -c 2048 </dev/null", &out, &said);
    const char *at = sb_cstr(&out);
    CHECK(rc == 0 && !arrlen(said), "exit code %d: %s", rc, sb_cstr(&said));
    for (int i = 0; i < 5; i++) {
        const char *next = strstr(at, titles[i]);
        if (CHECK(next, "'%s' is not in: %s", titles[i], out)) at = next;
        CHECK(strstr(out, want[i]), "'%s' is not in: %s", want[i], out);
    }
    for (const char *p = out, *end; (end = strchr(p, '\n')); p = end + 1) {
        CHECK(end - p <= DOCTOR_COLUMNS, "%d columns: %.120s", (int)(end - p), p);
        for (; p < end; p++) CHECK(*p >= 32 && *p < 127, "byte %d", *p);
        if (!end[1]) CHECK(strstr(end - 9, "warning"), "the last line is another: %s", out);
    }
    arrfree(out), arrfree(said);
    /* no model, none there, one cut off, several ranks */
    json_decref(doctor_json("--cpu", 0));
    json_t *none = doctor_json(IN_DIR("--cpu -m @/none.gguf"), 1), *last;
    last = json_array_get(json_object_get(none, "findings"), json_array_size(json_object_get(none, "findings")) - 1);
    CHECK_HAS(json_string_value(json_object_get(last, "what")), "/none.gguf': cannot open", "no model");
    json_decref(none);
    check_command(IN_DIR("head -c 100000 build/demo.gguf >@/cut.gguf; " MOE_BIN
                         " --doctor --cpu -m @/cut.gguf </dev/null >/dev/null"),
                  1, "", NULL);
    json_decref(doctor_json("--cpu --tp 2 -m build/demo.gguf -c 1200", 0));
    json_decref(doctor_json(IN_DIR("--cpu --haystack @/none.txt -m build/demo.gguf -c 1200"), 1));
    check_command(IN_DIR("ln moe @/moe && @/moe --doctor --cpu -m build/demo.gguf -c 1200 </dev/null | "
                         "grep -o 'note.*C is not checked'"),
                  0, "note     C is not checked\n", NULL); /* a program without its prompts */
    check_command(MOE_BIN " --doctor --smoke </dev/null", 2, "", "cannot be combined");
    check_command(MOE_BIN " --doctor --cpu --gpus 0 </dev/null", 2, "", "cannot be combined");
    check_command(MOE_BIN " --doctor --cpu --tp 3 --pp 2 </dev/null", 2, "", "makes 6 ranks; at most 4");
    check_command(MOE "--json </dev/null", 2, "", "--json works only with");
}

/* Ctrl-C ends the report: without a line after it, and as JSON without any output. */
static void test_doctor_interrupt(void) {
    for (int json = 0; json < 2; json++) {
        struct child p;
        char *out = NULL;
        if (!child_start(&p,
                         json ? "exec " MOE "--doctor --json --cpu-ref --verbose" : "exec " MOE "--doctor --cpu-ref"))
            return;
        if (child_expect(&p, json ? "loaded in" : "Forward completes?")) child_interrupt(&p);
        CHECK_INT(child_end(&p, &out, NULL), EXIT_INTERRUPT, "%s", sb_cstr(&out));
        if (json) CHECK_STR(sb_cstr(&out), "", "--json");
        else CHECK(!strstr(sb_cstr(&out), "errors, "), "the last line is there: %s", out);
        arrfree(out);
    }
}

/* What ends the program while a rank computes ends the report, too: --fault doctor. */
static void test_doctor_dies(void) {
    char self[512], cmd[640], *out = NULL, *said = NULL;
    json_error_t je;
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (!CHECK(n > 0, "no path of the program")) return;
    self[n] = 0;
    snprintf(cmd, sizeof cmd, "%s --fault doctor build/demo.gguf", self);
    int rc = run_command(cmd, &out, &said);
    json_t *all = json_loadb(arrlen(out) ? out : "", arrlenu(out), 0, &je);
    json_t *f = json_array_get(json_object_get(all, "findings"), 0);
    const char *what = json_string_value(json_object_get(f, "what"));
    CHECK(rc == EXIT_RUN && strstr(sb_cstr(&said), "an operation failed"), "exit code %d, said %s", rc, sb_cstr(&said));
    CHECK(what && !strncmp(what, "rank 1 of 4: layer ", 19) && json_integer_value(json_object_get(all, "exit")) == 1,
          "'%s'", sb_cstr(&out));
    CHECK(!strcmp(json_string_value(json_object_get(f, "step")), "forward"), "the step is another");
    json_decref(all);
    arrfree(out), arrfree(said);
}

#define TESTS_DOCTOR                                                                                                 \
    {"doctor/machine", test_doctor_machine}, {"doctor/quiet", test_doctor_quiet}, {"doctor/mute", test_doctor_mute}, \
        {"doctor/cli", test_doctor_cli}, {"doctor/interrupt", test_doctor_interrupt},                                \
        {"doctor/dies", test_doctor_dies},
