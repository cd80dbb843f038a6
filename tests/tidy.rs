//! Rules of the house that a compiler does not check, as ordinary tests: documents that name what exists, files that
//! say why they exist, and that stay readable.

use std::fs;
use std::path::{Path, PathBuf};

/// The most lines of a file.
const FILE_LINES: usize = 500;
/// The most lines of the architecture page.
const ARCHITECTURE_LINES: usize = 250;
/// Names that say nothing.
const EMPTY_NAMES: [&str; 5] = ["base.rs", "utils.rs", "common.rs", "helpers.rs", "misc.rs"];

/// The checkout that runs: one that shares its build outputs may have built this.
fn root() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").expect("cargo names it").into()
}

fn read(path: impl AsRef<Path>) -> String {
    let path = root().join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The Rust files of the repository, as paths below its root, in order.
fn rust_files() -> Vec<String> {
    fn walk(folder: &Path, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).expect("the folder is readable").flatten() {
            let path = entry.path();
            let name = entry.file_name().to_string_lossy().into_owned();
            if path.is_dir() {
                if !name.starts_with('.') && name != "target" {
                    walk(&path, found);
                }
            } else if name.ends_with(".rs") {
                let below = path.strip_prefix(root()).expect("walked from the root");
                found.push(below.display().to_string());
            }
        }
    }

    let mut found = Vec::new();
    walk(&root(), &mut found);
    found.sort();
    assert!(found.iter().any(|path| path == "tests/tidy.rs"), "{found:?}");
    found
}

#[track_caller]
fn check_none(rule: &str, violations: &[String]) {
    assert!(violations.is_empty(), "{rule}:\n{}", violations.join("\n"));
}

/// The code spans of a text.
fn code_spans(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// Whether a code span names a file or a folder: it has a slash or an extension, and nothing that code has.
fn is_path(span: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-/".contains(c);
    let file = [".rs", ".md", ".toml"].iter().any(|extension| span.ends_with(extension));
    span.chars().all(plain) && (span.contains('/') || file)
}

/// The paths of a text that do not exist, from the root or below a crate that the same paragraph names.
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
    check_none("named in docs/ARCHITECTURE.md and not there", &missing_paths(&page));
    let paths = code_spans(&page).filter(|span| is_path(span)).count();
    assert!(paths >= 20, "the page is a map, and names {paths} paths");
    let lines = page.lines().count();
    assert!(lines <= ARCHITECTURE_LINES, "{lines} lines: tell the details where they belong");
}

#[test]
fn a_path_that_is_not_there_would_be_noticed() {
    let page = "- `crates/firebox-plan`: see `src/planner.rs` and `src/gone.rs`.\n- `src/planner.rs` alone.\n\n\
                `docs/upstream.md`, `Lazy<B>` and `a / b` but no `docs/gone.md`.";
    assert_eq!(missing_paths(page), ["src/gone.rs", "src/planner.rs", "docs/gone.md"]);
}

#[test]
fn every_file_says_why_it_exists() {
    // Examples included: they are read more than anything else.
    let silent = rust_files().into_iter().filter(|path| !read(path).starts_with("//!"));
    check_none("files that do not open with `//!`", &silent.collect::<Vec<_>>());
}

#[test]
fn every_file_has_a_telling_name() {
    let empty = |path: &String| EMPTY_NAMES.contains(&path.rsplit('/').next().unwrap_or(path));
    let files: Vec<String> = rust_files().into_iter().filter(empty).collect();
    check_none("files with names that say nothing", &files);
}

#[test]
fn every_file_can_be_read_in_one_sitting() {
    let lines = |path: &String| read(path).lines().count();
    let long = rust_files().into_iter().filter(|path| lines(path) > FILE_LINES);
    check_none(
        "files of more than 500 lines: split them where they change subject",
        &long.collect::<Vec<_>>(),
    );
}

/// A documentation test that must not compile proves something only beside one that does.
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

/// The words of a command, without what does not change what is checked: the profile, and arguments of the program.
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
    let is_run = |line: &&str| {
        let wanted = command(line);
        run.iter().any(|words| wanted.iter().all(|word| words.contains(word)))
    };
    let skipped = commands.iter().filter(|line| !is_run(line));
    let skipped: Vec<String> = skipped.map(ToString::to_string).collect();
    check_none("commands of the README that .ci/run does not run", &skipped);
}
