//! Finds circles of files: files of one crate that import each other, directly or over others. A
//! module and its parents do not count: a parent names its parts, and parts know their parent.

use std::collections::{BTreeMap, BTreeSet};

/// A module, as the names of its path below the crate.
type Module = Vec<String>;

/// The imports of each module of a crate, among its modules.
type Imports = BTreeMap<Module, BTreeSet<Module>>;

/// The module that is the file `path` below `src`.
fn module(path: &str) -> Module {
    let names = path.trim_end_matches(".rs").split('/').map(str::to_owned);
    let mut names: Module = names.collect();
    if names.last().is_some_and(|last| last == "lib" || last == "mod") {
        names.pop();
    }
    names
}

/// A Rust text without comments and without its unit tests, which may import anything.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default());
    lines.collect::<Vec<_>>().join("\n")
}

/// The names of a path that begins with `::`, and what follows them.
fn names(mut text: &str) -> (Vec<&str>, &str) {
    let mut names = Vec::new();
    while let Some(rest) = text.strip_prefix("::") {
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        if end == 0 {
            break;
        }
        names.push(&rest[..end]);
        text = &rest[end..];
    }
    (names, text)
}

/// The paths below the crate that a file of `module` names.
fn paths(code: &str, module: &Module) -> Vec<Module> {
    let mut found = Vec::new();
    for (root, depth) in [("crate", 0), ("super", module.len().saturating_sub(1))] {
        for (at, _) in code.match_indices(&format!("{root}::")) {
            let before = code[..at].chars().next_back();
            if before.is_some_and(|c| c.is_alphanumeric() || c == '_' || c == ':') {
                continue;
            }
            let (path, rest) = names(&code[at + root.len()..]);
            let ups = path.iter().take_while(|name| **name == "super").count();
            let mut base: Module = module[..depth.saturating_sub(ups)].to_vec();
            base.extend(path[ups..].iter().map(|name| (*name).to_owned()));
            let list = rest.strip_prefix("::{").and_then(|list| list.split(';').next());
            let items = list.into_iter().flat_map(|list| list.split([',', '{', '}']));
            for item in items.map(|item| format!("::{}", item.trim())) {
                let below = names(&item).0.into_iter().map(str::to_owned);
                found.push(base.iter().cloned().chain(below).collect());
            }
            found.push(base);
        }
    }
    found
}

/// Whether one of two modules is a part of the other.
fn are_relatives(one: &Module, other: &Module) -> bool {
    one.starts_with(other) || other.starts_with(one)
}

/// Reads the imports of the files of a crate: their paths below `src`, and their texts.
fn imports(files: &[(String, String)]) -> Imports {
    let modules: BTreeSet<Module> = files.iter().map(|(path, _)| module(path)).collect();
    let home = |mut path: Module| {
        while !modules.contains(&path) && !path.is_empty() {
            path.pop();
        }
        path
    };
    let of_file = |(path, text): &(String, String)| {
        let own = module(path);
        let named = paths(&code(text), &own).into_iter().map(home);
        let others = named.filter(|other| !are_relatives(other, &own)).collect();
        (own, others)
    };
    files.iter().map(of_file).collect()
}

/// The modules that `from` imports, directly or over others.
fn reached<'a>(imports: &'a Imports, from: &Module) -> BTreeSet<&'a Module> {
    let mut found = BTreeSet::new();
    let mut next: Vec<&Module> = imports[from].iter().collect();
    while let Some(module) = next.pop() {
        if found.insert(module) {
            next.extend(&imports[module]);
        }
    }
    found
}

/// The modules of a crate that lie on circles, written as paths. Files are given by their paths
/// below `src`.
pub fn on_circles(files: &[(String, String)]) -> Vec<String> {
    let imports = imports(files);
    let circles = imports.keys().filter(|module| reached(&imports, module).contains(module));
    circles.map(|module| module.join("/")).collect()
}

#[test]
fn a_circle_would_be_noticed() {
    let file = |path: &str, text: &str| (path.to_owned(), text.to_owned());
    let circle = [
        file("lib.rs", "mod a;\nmod b;\n"),
        file("a.rs", "mod part;\nuse crate::b::{self, Thing};\n"),
        file("a/part.rs", "use super::Whole;\n// crate::c\n"),
        file("b.rs", "fn f() { crate::c::go() }\n"),
        file("c.rs", "use crate::{a::part::Part, d::D};\n"),
        file("d.rs", "#[cfg(test)]\nmod tests {\n    use crate::c::C;\n}\n"),
    ];
    // A parent and its part are no circle, and what only a part closes is none of the parent's.
    assert_eq!(on_circles(&circle), Vec::<String>::new());
    let mut closed = circle.clone();
    closed[2].1 = "use super::super::b::Thing;\n".to_owned();
    assert_eq!(on_circles(&closed), ["a/part", "b", "c"]);
    let mut inline = circle;
    inline[5].1 = "fn g() { crate::c::go() }\n".to_owned();
    assert_eq!(on_circles(&inline), ["c", "d"]);
}
