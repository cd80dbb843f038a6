//! House rules that the compiler does not check, as ordinary tests.
//!
//! Documents name only files that exist. Files say why they exist and stay readable.

mod circles;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum number of words on the architecture page.
const ARCHITECTURE_WORDS: usize = 1500;
/// File names that say nothing.
const EMPTY_NAMES: [&str; 5] = ["base.rs", "utils.rs", "common.rs", "helpers.rs", "misc.rs"];

/// Root of the checkout that runs. Another checkout that shares its build outputs may have built
/// this binary.
fn root() -> PathBuf {
    PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo names it")).join("..")
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The files of the repository whose names end in `extension`, as sorted paths below its root.
fn files(extension: &str) -> Vec<String> {
    fn walk(folder: &Path, extension: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).expect("the folder is readable").flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" {
                    walk(&path, extension, found);
                }
            } else if name.ends_with(extension) {
                let below = path.strip_prefix(root()).expect("walked from the root");
                found.push(below.display().to_string());
            }
        }
    }

    let mut found = Vec::new();
    walk(&root(), extension, &mut found);
    found.sort();
    found
}

/// The Rust files of the repository, as sorted paths below its root.
fn rust_files() -> Vec<String> {
    let found = files(".rs");
    assert!(found.iter().any(|path| path == "tests/tidy/main.rs"), "{found:?}");
    found
}

#[track_caller]
fn check_none(rule: &str, violations: &[String]) {
    assert!(violations.is_empty(), "{rule}:\n{}", violations.join("\n"));
}

/// Code spans of a text.
fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Whether a code span names a file or a folder: it has a slash or an extension, and only
/// characters found in paths.
fn is_path(span: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let file = [".rs", ".md", ".toml"].iter().any(|extension| span.ends_with(extension));
    span.chars().all(plain) && (span.contains('/') || file)
}

/// Paths in a text that do not exist, looked up from the root or from a crate named in the same
/// paragraph.
fn missing_paths(text: &str) -> Vec<String> {
    let mut missing = Vec::new();
    let items = text.replace("\n- ", "\n\n- ").replace("\n1. ", "\n\n1. ");
    let fenced = items.split("```").step_by(2);
    for paragraph in fenced.flat_map(|text| text.split("\n\n")) {
        let crates = code_spans(paragraph)
            .filter(|span| span.contains("firebox-"))
            .map(|span| root().join("crates").join(span.trim_start_matches("crates/")));
        let homes: Vec<PathBuf> = std::iter::once(root()).chain(crates).collect();
        let paths = code_spans(paragraph).filter(|span| is_path(span));
        let absent = paths.filter(|path| !homes.iter().any(|home| home.join(path).exists()));
        missing.extend(absent.map(str::to_owned));
    }
    missing
}

#[test]
fn the_architecture_page_names_what_exists() {
    let page = read("docs/ARCHITECTURE.md");
    // Paths without a crate are those of the Learner in this section.
    let (before, paths) = page.split_once("## Three paths").expect("the page has the section");
    let (paths, after) = paths.split_once("## Invariants").expect("the page has the section");
    let paths = paths.replace("`src/", "`crates/firebox-train/src/");
    let page = format!("{before}{paths}{after}");
    check_none("named in docs/ARCHITECTURE.md and not there", &missing_paths(&page));
    let paths = code_spans(&page).filter(|span| is_path(span)).count();
    assert!(paths >= 20, "the page is a map, and names {paths} paths");
    let words = page.split_whitespace().count();
    assert!(words <= ARCHITECTURE_WORDS, "{words} words: tell the details where they belong");
}

#[test]
fn a_path_that_is_not_there_would_be_noticed() {
    let page = "- `crates/firebox-plan`: see `src/planner.rs` and `src/gone.rs`.\n- `src/planner.rs` alone.\n\n\
                `docs/upstream.md`, `Lazy<B>` and `a / b` but no `docs/gone.md`.";
    assert_eq!(missing_paths(page), ["src/gone.rs", "src/planner.rs", "docs/gone.md"]);
}

/// The files that a Markdown text links to, relative to the text's own folder.
fn linked_files(text: &str) -> Vec<(&str, Option<&str>)> {
    let prose = text.split("```").step_by(2);
    let targets = prose.flat_map(|prose| prose.split("](").skip(1));
    let targets = targets.filter_map(|rest| rest.split(')').next());
    let files = targets.filter(|target| !target.starts_with("http"));
    files
        .map(|target| target.split_once('#').map_or((target, None), |(f, a)| (f, Some(a))))
        .collect()
}

/// The anchors of a document's headings, as GitHub makes them.
fn anchors(text: &str) -> Vec<String> {
    let headings = text.lines().filter(|line| line.starts_with('#'));
    let anchor = |heading: &str| {
        let text = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = text.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    };
    headings.map(anchor).collect()
}

#[test]
fn links_in_documents_lead_somewhere() {
    let covered = ["README.md", "CHANGELOG.md", "docs/", "benches/"];
    let mut broken = Vec::new();
    let mut links = 0;
    for document in files(".md") {
        if !covered.iter().any(|prefix| document.starts_with(prefix)) {
            continue;
        }
        let folder = root().join(&document).with_file_name("");
        let text = read(&document);
        for (file, anchor) in linked_files(&text) {
            links += 1;
            let path = folder.join(file);
            if !file.is_empty() && !path.exists() {
                broken.push(format!("{document}: {file}"));
            } else if let Some(anchor) = anchor
                && (file.is_empty() || file.ends_with(".md"))
            {
                let there = if file.is_empty() { &text } else { &read(&path) };
                if !anchors(there).iter().any(|known| known == anchor) {
                    broken.push(format!("{document}: {file}#{anchor}"));
                }
            }
        }
    }
    check_none("links to files or headings that do not exist", &broken);
    assert!(links >= 20, "the documents link to each other, and have {links} links");
}

#[test]
fn a_link_is_told_from_an_address_and_from_code() {
    let text = "[a](a.md#part), [b](#part), [c](https://c.org), [`d`](../d.rs)\n\
                ```text\n[e](e.md)\n```\n[f\ng](g/)";
    let expected = [("a.md", Some("part")), ("", Some("part")), ("../d.rs", None), ("g/", None)];
    assert_eq!(linked_files(text), expected);
    assert_eq!(anchors("## What, and `why`?\ntext\n# One"), ["what-and-why", "one"]);
}

#[test]
fn every_file_says_why_it_exists() {
    // Examples are included, because they are read more than anything else.
    let silent = rust_files().into_iter().filter(|path| !read(path).starts_with("//!"));
    check_none("files that do not open with `//!`", &silent.collect::<Vec<_>>());
}

/// Names of items that were given up, and the names that they have now.
const GIVEN_UP: [(&str, &str); 10] = [
    ("BesideBytes", "OverheadBytes"),
    ("Beside", "Overhead, apart from the pool's region"),
    ("Course", "RehearsalPlan"),
    ("Life", "ProcessReplay"),
    ("Interference", "OtherTensors"),
    ("footprint_after", "Question"),
    ("footprint_given_back", "Question"),
    ("plan_training", "prepare_training"),
    ("Work", "Prepared"),
    ("utils", "a name that says what it is"),
];

/// The words of a Rust file that name an item or a module of another name now.
fn given_up_names(path: &str, text: &str) -> Vec<String> {
    let keywords = ["struct", "enum", "trait", "type", "fn", "mod"];
    let mut found = Vec::new();
    for (at, line) in text.lines().enumerate() {
        let words = line.split(|c: char| !c.is_alphanumeric() && c != '_');
        let words: Vec<&str> = words.filter(|word| !word.is_empty()).collect();
        for pair in words.windows(2).filter(|pair| keywords.contains(&pair[0])) {
            let now = GIVEN_UP.iter().find(|(old, _)| *old == pair[1]);
            found.extend(now.map(|(old, new)| format!("{path}:{}: {old}, now {new}", at + 1)));
        }
    }
    found
}

#[test]
fn names_that_were_given_up_do_not_come_back() {
    let files = rust_files();
    let found: Vec<String> =
        files.iter().flat_map(|path| given_up_names(path, &read(path))).collect();
    check_none("items have one name each", &found);
    let (course, after) = (GIVEN_UP[2].0, GIVEN_UP[5].0);
    let old = &format!("pub(crate) struct {course} {{\n// A word: {course}.\nfn {after}() {{}}\n");
    let noticed = given_up_names("a.rs", old);
    let expected = ["a.rs:1: Course, now RehearsalPlan", "a.rs:3: footprint_after, now Question"];
    assert_eq!(noticed, expected);
}

#[test]
fn every_file_has_a_telling_name() {
    let empty = |path: &String| EMPTY_NAMES.contains(&path.rsplit('/').next().unwrap_or(path));
    let files: Vec<String> = rust_files().into_iter().filter(empty).collect();
    check_none("files with names that say nothing", &files);
}

/// The files that know each other on purpose: what a tensor is, what its recording is, and what a
/// deferred call is cannot be told apart.
const KNOT: [&str; 5] = [
    "firebox-lazy/record/arrival",
    "firebox-lazy/record/session",
    "firebox-lazy/tensor",
    "firebox-lazy/threads/deferred",
    "firebox-lazy/threads/loaders",
];

#[test]
fn files_do_not_import_each_other_in_circles() {
    let mut crates: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for path in rust_files() {
        let source = path.strip_prefix("crates/").and_then(|below| below.split_once("/src/"));
        if let Some((name, below)) = source {
            crates.entry(name.to_owned()).or_default().push((below.to_owned(), read(&path)));
        }
    }
    assert!(crates.len() > 9, "{:?}", crates.keys());
    let circles = crates.iter().flat_map(|(name, files)| {
        circles::on_circles(files).into_iter().map(move |file| format!("{name}/{file}"))
    });
    assert_eq!(circles.collect::<Vec<_>>(), KNOT, "files on circles");
}

/// The longest line of a comment, in columns.
const COMMENT_COLUMNS: usize = 100;

/// The comment lines of a Rust file that are too long. Compiler messages are quoted unchanged.
fn long_comments(path: &str) -> Vec<String> {
    let text = read(path);
    let is_long = |line: &&str| {
        let is_quoted = line.starts_with("//!     ");
        line.trim_start().starts_with("//") && !is_quoted && line.chars().count() > COMMENT_COLUMNS
    };
    text.lines().filter(is_long).map(|line| format!("{path}: {line}")).collect()
}

#[test]
fn comments_fit_a_page() {
    let long = rust_files().into_iter().flat_map(|path| long_comments(&path));
    check_none("comment lines of more than 100 columns", &long.collect::<Vec<_>>());
}

/// A documentation test that must not compile proves something only next to one that does.
#[test]
fn the_example_that_must_not_compile_differs_from_the_other_in_the_backend() {
    let page = read("src/diagnostics.rs");
    let examples: Vec<Vec<&str>> = page
        .split("//! ```")
        .skip(1)
        .step_by(2)
        .map(|block| block.lines().skip(1).collect())
        .collect();
    let [compiles, fails, message] = examples.as_slice() else { panic!("{examples:?}") };
    let differing: Vec<_> =
        compiles.iter().zip(fails).filter(|(one, other)| one != other).collect();
    let backends = (&"//! type B = Autodiff<Lazy<Flex>>;", &"//! type B = Autodiff<Flex>;");
    assert_eq!((compiles.len(), differing), (fails.len(), vec![backends]));
    let said = read("crates/firebox-lazy/src/backend.rs");
    for words in ["cannot record its operations", "put `Lazy` around the innermost backend"] {
        assert!(said.contains(words) && message.iter().any(|line| line.contains(words)), "{words}");
    }
}

/// Words of a command, without those that do not change what is checked: the profile and the
/// program's arguments.
fn command(line: &str) -> Vec<&str> {
    let line = line.split('#').next().unwrap_or(line);
    line.split_whitespace().take_while(|word| *word != "--").filter(|w| *w != "--release").collect()
}

#[test]
fn the_commands_of_the_readme_are_run() {
    let readme = read("README.md");
    let commands: Vec<&str> = readme
        .split("```sh\n")
        .skip(1)
        .filter_map(|block| block.split("```").next())
        .flat_map(str::lines)
        .filter(|line| line.starts_with("cargo "))
        .collect();
    assert!(commands.len() >= 2, "the README has commands: {commands:?}");
    let script = read(".ci/run");
    let run: Vec<Vec<&str>> =
        script.lines().map(command).filter(|words| !words.contains(&"echo")).collect();
    // An example may also be run as the program that the tests have built.
    let is_run = |line: &&str| {
        let wanted = command(line);
        let example = wanted.iter().skip_while(|word| **word != "--example").nth(1);
        let program = example.map(|name| format!("\"$CARGO_TARGET_DIR/debug/examples/{name}\""));
        run.iter().any(|words| {
            wanted.iter().all(|word| words.contains(word))
                || program.as_deref().is_some_and(|program| words.contains(&program))
        })
    };
    let skipped = commands.iter().filter(|line| !is_run(line));
    let skipped: Vec<String> = skipped.map(ToString::to_string).collect();
    check_none("commands of the README that .ci/run does not run", &skipped);
}
