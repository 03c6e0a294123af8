"""Facts for the task `statements`: relations with their subjects and objects, all written for softgap."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["RELATIONS", "Relation"]


@dataclass(frozen=True)
class Relation:
    """A sentence with a subject and an object, and which object belongs to which subject."""

    name: str
    sentence: str
    pairs: tuple[tuple[str, str], ...]


def _pairs(text: str) -> tuple[tuple[str, str], ...]:
    entries = (entry.partition("=") for entry in text.split(";"))
    return tuple((subject.strip(), value.strip()) for subject, _, value in entries)


RELATIONS = (
    Relation(
        "capital",
        "The capital of {subject} is {object}.",
        _pairs(
            "France=Paris; Italy=Rome; Spain=Madrid; Germany=Berlin; Japan=Tokyo; Egypt=Cairo; Norway=Oslo; "
            "Greece=Athens; Portugal=Lisbon; Poland=Warsaw; Austria=Vienna; Hungary=Budapest; Sweden=Stockholm; "
            "Peru=Lima; Cuba=Havana; Kenya=Nairobi; Ireland=Dublin; Finland=Helsinki; Denmark=Copenhagen; "
            "Thailand=Bangkok; Argentina=Buenos Aires; Canada=Ottawa; Australia=Canberra; Chile=Santiago"
        ),
    ),
    Relation(
        "symbol",
        "The chemical symbol of {subject} is {object}.",
        _pairs(
            "hydrogen=H; helium=He; carbon=C; nitrogen=N; oxygen=O; sodium=Na; magnesium=Mg; aluminium=Al; sulfur=S; "
            "chlorine=Cl; potassium=K; calcium=Ca; iron=Fe; copper=Cu; zinc=Zn; silver=Ag; tin=Sn; gold=Au; "
            "mercury=Hg; lead=Pb"
        ),
    ),
    Relation(
        "legs",
        "The number of legs of a healthy {subject} is {object}.",
        _pairs("dog=four; spider=eight; ant=six; chicken=two; snake=zero; horse=four; bee=six; ostrich=two"),
    ),
    Relation(
        "opposite",
        "The opposite of {subject} is {object}.",
        _pairs(
            "hot=cold; tall=short; dark=light; wet=dry; early=late; empty=full; noisy=quiet; "
            "rich=poor; strong=weak; young=old; slow=fast; deep=shallow; sharp=blunt; rough=smooth; open=closed"
        ),
    ),
    Relation(
        "young",
        "A young {subject} is called a {object}.",
        _pairs(
            "dog=puppy; cat=kitten; cow=calf; sheep=lamb; horse=foal; goose=gosling; pig=piglet; frog=tadpole; "
            "duck=duckling; swan=cygnet; kangaroo=joey; hare=leveret"
        ),
    ),
    Relation(
        "after",
        "The day after {subject} is {object}.",
        _pairs(
            "Monday=Tuesday; Tuesday=Wednesday; Wednesday=Thursday; Thursday=Friday; Friday=Saturday; "
            "Saturday=Sunday; Sunday=Monday"
        ),
    ),
    Relation(
        "continent",
        "{subject} lies in {object}.",
        _pairs(
            "Nigeria=Africa; Brazil=South America; Mexico=North America; India=Asia; Belgium=Europe; Ghana=Africa; "
            "Vietnam=Asia; Bolivia=South America; Romania=Europe; Mongolia=Asia; Morocco=Africa; Colombia=South America"
        ),
    ),
)
"""Every object belongs to the subject before it, and to no other of the same relation unless it stands there again."""
